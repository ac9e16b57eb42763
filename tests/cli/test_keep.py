"""``down --keep``, then a machine that has forgotten its memory, then ``up``: every job goes on.

The next scheduler may have other options, and may be of another version.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from gpuslice.client.client import Client
from gpuslice.daemon.scheduler_setup import CORE_VERSION
from gpuslice.errors import UsageError
from gpuslice.sched_core.journal.journal import FILE, Journal

from ..gpuslice.conftest import servers, train_undisturbed
from ..gpuslice.warm.process import Servers
from ..patience import PATIENCE_S
from ..sched_core import torchrun_elastic
from ..sched_core.test_gangs import digest
from .conftest import RANK, Shell
from .test_training import ATTACHED, STEADY
from .waiting import until

__all__ = ["servers"]

GANG = Path(__file__).parents[1] / "sched_core" / "attached_ddp.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
EPOCHS = "3"


def kept_files(shell: Shell) -> list[str]:
    return sorted(path.name for path in (shell.directory / "kept").glob("*.gsnp"))


@pytest.mark.slow
@pytest.mark.trainings
def test_models_are_the_undisturbed_ones_though_the_ram_disk_was_emptied(
    shell: Shell, tmp_path: Path
) -> None:
    memory, enough = tmp_path / "memory", tmp_path / "enough"
    shell.variables["GPUSLICE_RAMDISK_DIR"] = str(memory)
    environ = {**STEADY, "GPUSLICE_RAMDISK_DIR": str(memory)}
    options = ("--devices", "cpu:2", "--quantum", "200ms")
    shell("up", *options)
    client = shell.client()
    running, parked, alone = (
        client.submit(
            [str(ATTACHED), EPOCHS, *([str(enough)] if name != "alone" else [])], name=name, environ=environ
        )
        for name in ("running", "parked", "alone")
    )
    undisturbed = client.wait(alone, PATIENCE_S)
    assert undisturbed is not None
    until(client, parked, lambda info: info.steps > 20)
    client.suspend(parked)
    until(client, parked, lambda info: info.state == "suspended")
    begun = until(client, running, lambda info: info.steps > 20)
    digest_of_alone = Path(client.logs(alone).out).read_text().split()[-1]
    made_alone = _made(client.logs(alone).err)
    shell("down", "--keep")

    assert {name.partition("@")[0] for name in kept_files(shell)} == {"parked", "running"}
    told = [json.loads(line) for line in shell("events", "--json").splitlines()]
    assert [one["details"]["step"] for one in told if one["what"] == "keep"][-1] == "end"
    assert {one["job"] for one in told if one["what"] == "kept"} == {running, parked}
    rows = {one["id"]: one for one in json.loads(shell("ps", "--json"))["jobs"]}
    assert rows[running]["why"] == "kept for the next `gpuslice up`"
    assert rows[running]["steps"] >= begun.steps
    shutil.rmtree(memory)  # as the reboot of a machine does
    enough.touch()

    pretend_another_version(shell.directory)
    shell("up", "--devices", "cpu:1", "--policy", "las")
    client = shell.client()
    (first, *_) = client.events()
    assert (first.what, first.details["jobs"]) == ("taken_over", 2)
    until(client, parked, lambda info: info.held)
    client.resume(parked)
    for job in (running, parked):
        ended = client.wait(job, PATIENCE_S)
        assert ended is not None
        assert (ended.state, ended.restarts) == ("succeeded", 0)
        assert Path(client.logs(job).out).read_text().split()[-1] == digest_of_alone
        assert 0 < _made(client.logs(job).err)[-1] < made_alone[0], "it began anew"
    assert (shell.directory / "past-1" / "logs" / f"{alone}.out").exists()
    shell("down")
    assert not kept_files(shell)


@pytest.mark.slow
@pytest.mark.gangs
def test_a_gang_and_an_elastic_job_go_on_though_the_ram_disk_was_emptied(
    shell: Shell, tmp_path: Path, servers: Servers
) -> None:
    memory, enough, log = tmp_path / "memory", tmp_path / "enough", tmp_path / "log"
    log.mkdir()
    shell.variables["GPUSLICE_RAMDISK_DIR"] = str(memory)
    environ = {**STEADY, "GPUSLICE_RAMDISK_DIR": str(memory)}
    options = ("--devices", "cpu:3", "--policy", "gandiva", "--quantum", "500ms")
    shell("up", *options)
    client = shell.client()
    words = (str(GANG), EPOCHS, str(enough))
    gang = client.submit(["--", *TORCHRUN, "--nproc-per-node", "2", *words], devices=2, environ=environ)
    elastic = client.submit(
        ["--", *TORCHRUN, str(torchrun_elastic.__file__), str(log), "all epochs"],
        devices=1,
        most_devices=2,
        environ={**environ, "EPOCHS": "40"},
    )
    for job in (gang, elastic):
        until(client, job, lambda info: info.steps > 5)
    shell("down", "--keep")
    shutil.rmtree(memory)
    enough.touch()
    shell("up", *options)
    client = shell.client()
    for job in (gang, elastic):
        ended = client.wait(job, PATIENCE_S)
        assert ended is not None
        assert (ended.state, ended.restarts) == ("succeeded", 0), client.read_log(job, err=True)
    alone = train_undisturbed(tmp_path, servers, 2, *words)
    assert digest(client.read_log(gang).decode()) == digest(alone)
    seen = Counter(
        index
        for path in log.glob("log.*")
        for line in path.read_text().splitlines()
        for index in json.loads(line)["seen"]
    )
    assert set(seen) == set(range(torchrun_elastic.LENGTH))
    assert len(set(seen.values())) == 1, "a sample was lost, or seen twice"
    shell("down")


def _made(path: str) -> list[int]:
    """Return how many batches each process has made that wrote its stderr to ``path``."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("made")]


def pretend_another_version(directory: Path) -> None:
    """Have the journal say that a core of another version wrote it."""
    with Journal(directory / FILE) as journal:
        written = msgspec.json.decode(journal.about() or b"")
        journal.introduce(msgspec.json.encode({**written, "core_version": CORE_VERSION + 1}))


def test_a_job_that_cannot_be_kept_is_named_and_all_go_on(shell: Shell) -> None:
    shell.up()
    client = shell.client()
    enough = shell.directory / "enough"
    words = [sys.executable, str(RANK), str(enough), "0"]
    bad = client.submit(["--", *words], name="bad")
    good = client.submit(["--", *words, "--portable"], name="good")
    for job in (bad, good):
        until(client, job, lambda info: info.steps > 0)
    pid = shell.pid
    said = shell("down", "--keep", code=2)
    assert "1 job cannot be kept: bad (no other process can go on from its snapshot" in said
    assert "exclude" in shell("down", "--keep", "--drain", code=2)
    enough.touch()
    assert {client.wait(job, PATIENCE_S).state for job in (bad, good)} == {"succeeded"}  # type: ignore[union-attr]
    assert shell.pid == pid
    shell("down")


def test_it_is_called_off_by_an_interrupt(shell: Shell) -> None:
    shell.up()
    client, enough = shell.client(), shell.directory / "enough"
    job = client.submit(["--", sys.executable, str(RANK), str(enough), "0", "--portable"])
    until(client, job, lambda info: info.steps > 0)
    assert "no `gpuslice down --keep` is under way" in interrupted(client)
    processes = shell.processes_of(job)
    for process in processes:
        process.suspend()  # so it reaches no boundary
    with shell.start(
        [sys.executable, "-m", "gpuslice", "down", "--keep"],
        env={**os.environ, "GPUSLICE_STATE_DIR": str(shell.directory)},
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        until(client, job, lambda info: info.state == "suspending")
        command.send_signal(signal.SIGINT)
        _, said = command.communicate(timeout=PATIENCE_S)
    assert (command.returncode, said) == (130, "gpuslice: called off: all jobs go on\n")
    for process in processes:
        process.resume()
    enough.touch()
    ended = client.wait(job, PATIENCE_S)
    assert ended is not None
    assert (ended.state, ended.restarts) == ("succeeded", 0)
    shell("down")


def interrupted(client: Client) -> str:
    """Return the error of a client that calls off what is not under way."""
    with pytest.raises(UsageError) as caught:
        client.call_off()
    return caught.value.message


def test_kept_jobs_wait_without_a_process_and_go_on(shell: Shell) -> None:
    shell.up()
    client = shell.client()
    enough = shell.directory / "enough"
    jobs = [
        client.submit(["--", sys.executable, str(RANK), str(enough), "0", "--portable"]) for _ in range(2)
    ]
    for job in jobs:
        until(client, job, lambda info: info.steps > 0)
    shell("down", "--keep")
    assert not [one for job in jobs for one in shell.processes_of(job)]
    enough.touch()
    shell.up()
    assert {client.wait(job, PATIENCE_S).state for job in jobs} == {"succeeded"}  # type: ignore[union-attr]
    shell("down")
