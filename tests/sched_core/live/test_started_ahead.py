"""A command that is started before its turn does nothing until then, and nothing is left of one in vain."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuslice.agent.start_ahead import begin
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.lifecycle.events import Exited
from gpuslice.sched_core.nodes.processes import Processes

from ...patience import PATIENCE_S

#: Waits at its gate as a script does that imports torch later, then notes its process and variable.
_SCRIPT = """
import os, sys
from gpuslice.agent.start_ahead import wait
wait()
open("trains", "w").write(f"{os.getpid()} {os.environ.get('GPUSLICE_GATE')}")
"""
_ENVIRON = {"GPUSLICE_JOB": "a"}


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.close()


def until(holds: Callable[[], bool]) -> None:
    late_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < late_s
        time.sleep(0.01)


def program(directory: Path, script: str = _SCRIPT) -> Program:
    return Program((sys.executable, "-c", script), str(directory), dict(os.environ))


def start(processes: Processes, directory: Path, script: str = _SCRIPT, attempt: int = 1) -> None:
    """Start an attempt ahead, and wait until it waits at its gate or has ended."""
    processes.ahead.start("a", program(directory, script), _ENVIRON, attempt)
    until(lambda: processes.ahead.arrived() == [("a", attempt)])


def launch(processes: Processes, directory: Path, **other: str) -> list[object]:
    """Launch attempt 1 in its turn. Return what is told when it has ended."""
    processes.launch("a", program(directory), {**_ENVIRON, **other}, attempt=1)
    ends: list[object] = []
    until(lambda: bool(ends.extend(processes.wait(0.1)) or ends))
    return ends


def left(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.suffix in (".gate", ".ahead")]


def gone(directory: Path) -> Callable[[], bool]:
    """What is true once no process has its working directory in ``directory``."""

    def check() -> bool:
        for found in Path("/proc").glob("[0-9]*/cwd"):
            try:
                if found.readlink() == directory:
                    return False
            except OSError:
                pass
        return True

    return check


def test_it_goes_on_in_its_turn_as_the_process_that_it_was(processes: Processes, tmp_path: Path) -> None:
    start(processes, tmp_path)
    assert not (tmp_path / "trains").exists()
    assert not processes.launched("a", 1)
    assert launch(processes, tmp_path) == [Exited("a", 0, attempt=1)]
    assert (tmp_path / "trains").read_text().endswith(" None")
    assert processes.launched("a", 1)
    assert left(tmp_path) == []


def test_one_whose_turn_comes_before_it_is_at_its_gate_goes_on_all_the_same(
    processes: Processes, tmp_path: Path
) -> None:
    late = f"import os, time\nwhile not os.path.exists('come'): time.sleep(0.01)\n{_SCRIPT}"
    processes.ahead.start("a", program(tmp_path, late), _ENVIRON, 1)
    assert processes.ahead.arrived() == []
    processes.launch("a", program(tmp_path, late), _ENVIRON, attempt=1)
    (tmp_path / "come").touch()
    ends: list[object] = []
    until(lambda: bool(ends.extend(processes.wait(0.1)) or ends))
    assert ends == [Exited("a", 0, attempt=1)]
    assert (tmp_path / "trains").exists()
    assert left(tmp_path) == []


@pytest.mark.parametrize("other", [{"GPUSLICE_BEGIN": "other"}, {}])
def test_another_command_is_started_from_the_beginning(
    other: dict[str, str], processes: Processes, tmp_path: Path
) -> None:
    start(processes, tmp_path, attempt=1 if other else 2)
    assert launch(processes, tmp_path, **other) == [Exited("a", 0, attempt=1)]
    assert left(tmp_path) == []
    assert gone(tmp_path)()


def test_one_that_has_ended_is_started_again_in_its_turn(processes: Processes, tmp_path: Path) -> None:
    start(processes, tmp_path, "raise SystemExit(3)")
    assert launch(processes, tmp_path) == [Exited("a", 0, attempt=1)]
    assert left(tmp_path) == []


@pytest.mark.parametrize("by", ["give_up", "close", "death"])
def test_one_in_vain_ends_and_leaves_nothing(by: str, processes: Processes, tmp_path: Path) -> None:
    start(processes, tmp_path)
    if by == "give_up":
        processes.ahead.give_up("a")
    elif by == "close":
        processes.close()
    else:
        waiting = processes.ahead._waiting.pop("a")
        os.close(waiting.gate)  # as the end of this process would
        waiting.process.wait(PATIENCE_S)
        processes = Processes(tmp_path)
    until(gone(tmp_path))
    assert left(tmp_path) == []
    assert not (tmp_path / "trains").exists()
    assert not processes.launched("a", 1)


@pytest.mark.parametrize(
    ("script", "waits"),
    [
        ("'''Trains.'''\nfrom __future__ import annotations\nimport os, torch\nprint()", False),
        ("import os\nos.environ['A'] = 'b'\nfrom torch import nn\n", False),
        ("import os\nprint('once')\nimport torch\n", True),
        ("import shutil\nshutil.rmtree('out')\nimport torch\n", True),
        ("import os, sys\n", True),
        ("import torch as\n", True),
    ],
)
def test_a_script_that_does_more_than_import_waits_before_it_begins(
    script: str, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.py"
    path.write_text(script)
    waited: list[bool] = []
    monkeypatch.setattr("gpuslice.agent.start_ahead.wait", lambda: waited.append(True))
    begin("", str(path))
    assert bool(waited) == waits
    begin("m", "train")
    assert waited[-1]
