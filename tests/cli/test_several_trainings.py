"""Jobs whose command trains more than once, as users start them: a line of shell, a loop, make.

Their ranks are `rank.py`, which says so if another process is on its device.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from ..patience import PATIENCE_S
from .conftest import RANK, Shell
from .waiting import until

TRAIN = f"{shlex.quote(sys.executable)} {shlex.quote(str(RANK))}"
COMMANDS = {
    "one after another": (f"{TRAIN} 60 0; {TRAIN} 60 0", 120),
    "a look first": (f"{TRAIN} 0 0 --looks && exec {TRAIN} 60 0", 60),
    "until it works": (f"for code in 3 1 0; do {TRAIN} 40 $code && break; done", 120),
    "after one that was killed": (f"{TRAIN} 9999 0 --dies parking || {TRAIN} 60 0", None),
    "two at once": (f"{TRAIN} 60 0 & {TRAIN} 60 0 & wait", 120),
    "many at once": (" ".join(f"{TRAIN} 20 0 &" for _ in range(4)) + " wait", 80),
    "nothing between for a while": (f"{TRAIN} 60 0; sleep 0.6; {TRAIN} 60 0", 120),
}


def submit(shell: Shell, name: str, line: str, locks: Path) -> str:
    locks.mkdir(exist_ok=True)
    environ = {**os.environ, "WORLD": "1", "RANK_LOCKS": str(locks)}
    return shell.client().submit(["--", "bash", "-c", line], name=name, environ=environ)


@pytest.mark.parametrize("what", COMMANDS)
def test_all_trainings_of_a_command_and_another_job_end(shell: Shell, tmp_path: Path, what: str) -> None:
    line, steps = COMMANDS[what]
    shell.up()
    job = submit(shell, "several", line, tmp_path / "locks")
    other = submit(shell, "other", f"{TRAIN} 150 0", tmp_path / "locks")
    client = shell.client()
    ended = [client.wait(one, PATIENCE_S) for one in (job, other)]
    assert [one and one.state for one in ended] == ["succeeded", "succeeded"], ended
    assert ended[0] is not None
    if steps is not None:
        assert ended[0].steps == steps
    printed = [Path(client.logs(one).out).read_text() for one in (job, other)]
    assert "clash" not in "".join(printed)
    assert all(not device.jobs for device in shell.status().devices)
    shell("down")


def test_make_trains_what_is_missing(shell: Shell, tmp_path: Path) -> None:
    makefile = tmp_path / "Makefile"
    recipe = f"\t{TRAIN} 30 0 && touch $@\n"
    makefile.write_text(f"all: a b c\na:\n{recipe}b: a\n{recipe}c: a\n{recipe}")
    shell.up()
    job = submit(shell, "made", f"cd {shlex.quote(str(tmp_path))} && make -j 2", tmp_path / "locks")
    ended = shell.client().wait(job, PATIENCE_S)
    assert ended is not None
    assert (ended.state, ended.steps) == ("succeeded", 90)
    assert "clash" not in Path(shell.client().logs(job).out).read_text()
    shell("down")


def test_a_job_fails_with_its_command_not_with_one_of_its_trainings(shell: Shell, tmp_path: Path) -> None:
    shell.up()
    job = submit(shell, "fails", f"{TRAIN} 20 0; {TRAIN} 20 7", tmp_path / "locks")
    ended = shell.client().wait(job, PATIENCE_S)
    assert ended is not None
    assert (ended.state, ended.exit_code, ended.steps) == ("failed", 7, 40)
    shell("down")


def test_who_waits_for_whom_is_said(shell: Shell, tmp_path: Path) -> None:
    shell.up()
    enough = tmp_path / "enough"
    line = f"{TRAIN} {shlex.quote(str(enough))} 0 & {TRAIN} {shlex.quote(str(enough))} 0 & wait"
    client, job = shell.client(), submit(shell, "twice", line, tmp_path / "locks")
    info = until(client, job, lambda info: info.processes is not None)
    assert info.processes is not None
    assert "waits for the end of" in info.processes
    assert info.processes in shell("ps", "--wide")
    enough.touch()
    ended = client.wait(job, PATIENCE_S)
    assert ended is not None
    assert ended.state == "succeeded"
    shell("down")


def test_a_scheduler_that_is_killed_in_the_second_training_goes_on_with_it(
    shell: Shell, tmp_path: Path
) -> None:
    shell.up()
    enough = tmp_path / "enough"
    line = f"{TRAIN} 30 0; {TRAIN} {shlex.quote(str(enough))} 0; {TRAIN} 30 0"
    job = submit(shell, "several", line, tmp_path / "locks")
    other = submit(shell, "other", f"{TRAIN} 150 0", tmp_path / "locks")
    client = shell.client()
    before = until(client, job, lambda info: info.steps > 40)
    shell.kill()
    shell.up()
    client = shell.client()
    until(client, job, lambda info: info.steps > before.steps)
    shell.kill()
    enough.touch()  # the second training ends, and the third begins, while there is no scheduler
    shell.up()
    client = shell.client()
    ended = [client.wait(one, PATIENCE_S) for one in (job, other)]
    assert [one and one.state for one in ended] == ["succeeded", "succeeded"], ended
    assert ended[0] is not None
    assert ended[0].steps > 60  # (the journal does not have the newest heartbeat of a process that is gone)
    assert "clash" not in "".join(Path(client.logs(one).out).read_text() for one in (job, other))
    shell("down")


#: A driver that imports torch, has a training made, and trains at last itself.
DRIVER = """
import subprocess, sys, torch

def train(steps):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4)).sum().backward()
        optimizer.step()

if sys.argv[1:]:
    train(int(sys.argv[1]))
else:
    subprocess.run([sys.executable, __file__, "30"], check=True)
    train(50)
"""


@pytest.mark.slow
def test_trainings_that_a_driver_starts_and_its_own_are_ranks_in_turn(shell: Shell, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    shell("up", "--devices", "cpu:1", "--quantum", "100ms")
    client = shell.client()
    job = client.submit([str(script)], name="driver", environ={**os.environ, "OMP_NUM_THREADS": "1"})
    other = submit(shell, "other", f"{TRAIN} 200 0", tmp_path / "locks")
    ended = [client.wait(one, PATIENCE_S) for one in (job, other)]
    told = Path(client.logs(job).err).read_text(encoding="utf-8")
    assert [one and one.state for one in ended] == ["succeeded", "succeeded"], told
    assert ended[0] is not None
    assert ended[0].steps == 80, told
    assert "rejected" not in told
    assert "beside" not in told
    shell("down")
