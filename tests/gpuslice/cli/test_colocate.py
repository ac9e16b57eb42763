"""The experiment as a whole: it goes on after Ctrl-C, and says what is wrong with a script."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from gpuslice.cli import colocate, main
from gpuslice.config import Settings
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.kernels import nvml
from gpuslice.kernels.nvml import Driver, Gpu
from gpuslice.launch.colocation import run_together
from gpuslice.launch.kept_trials import KeptTrials
from gpuslice.launch.time_slicing import run_sliced
from gpuslice.profiler.colocation.plan import Plan, Task
from gpuslice.profiler.colocation.trial import Run

from ..warm.process import Servers

#: What a machine of known truth measures: together, all are half as fast.
PLAN = Plan(3, 2, 2)
TRAIN = """
import sys, torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("begins")
for batch in DataLoader(torch.ones(1, 8).expand(int(sys.argv[1]), 8), batch_size=1):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""


def measured(task: Task) -> tuple[Run, ...]:
    return tuple(Run(100.0 / len(task.members), 1.0, 1, 1000, (0.01,)) for _ in task.members)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("GPUSLICE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("GPUSLICE_STATE_DIR", str(tmp_path / "state"))
    return tmp_path


def test_after_ctrl_c_it_goes_on_where_it_was(tmp_path: Path) -> None:
    ran: list[Task] = []

    def run(task: Task) -> tuple[Run, ...]:
        if len(ran) == 4 and not interrupted:
            interrupted.append(task)
            raise KeyboardInterrupt
        ran.append(task)
        return measured(task)

    interrupted: list[Task] = []
    with KeptTrials(tmp_path / "kept") as kept:
        assert not colocate.measure_all(PLAN, kept, run, None, lambda left, task: None)
        assert len(kept.trials) == 4
    with KeptTrials(tmp_path / "kept") as kept:
        assert colocate.measure_all(PLAN, kept, run, None, lambda left, task: None)
        assert [one.task for one in kept.trials] == list(PLAN.tasks())
    assert ran == list(PLAN.tasks())


def test_sets_that_do_not_fit_never_run(tmp_path: Path) -> None:
    ran: list[Task] = []

    def run(task: Task) -> tuple[Run, ...]:
        ran.append(task)
        return measured(task)

    with KeptTrials(tmp_path / "kept") as kept:
        assert colocate.measure_all(PLAN, kept, run, 1500, lambda left, task: None)
    assert {task.mode for task in ran} == {"alone"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_command_after_ctrl_c(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    for name in ("a.py", "b.py"):
        (place / name).write_text("", encoding="utf-8")
    ran: list[int] = []

    def run_together(names: list[str], *_: object) -> tuple[Run, ...]:
        if len(ran) == 3:
            ran.append(0)
            signal.raise_signal(number)
        ran.append(len(names))
        return measured(Task(0, tuple(range(len(names))), "packed"))

    monkeypatch.setattr("gpuslice.launch.colocation.run_together", run_together)
    monkeypatch.setattr("gpuslice.launch.time_slicing.run_sliced", run_together)
    words = ["colocate", "a.py", "b.py", "--repeats", "2", "--json", "o.json", "--csv", "o.csv"]
    words += ["--html", "o.html"]
    assert status(words) == 130
    assert "goes on from here" in capsys.readouterr().err
    assert json.loads((place / "o.json").read_text(encoding="utf-8"))["complete"] is False
    assert status(words) == 0
    assert sum(1 for count in ran if count) == 8
    found = json.loads((place / "o.json").read_text(encoding="utf-8"))
    assert found["complete"]
    assert (found["sets"][0]["normalized"], found["sets"][0]["verdict"]) == ([0.5, 0.5], "slice")
    assert "a.py + b.py,packed,a.py,0.5,0.5,0.5,1.0,slice" in (place / "o.csv").read_text(encoding="utf-8")
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("a.py + b.py")]
    total = "total 1.000 [1.000, 1.000]"
    assert told == [f"a.py + b.py: slice, {total}", f"a.py + b.py, sliced: {total}"]
    assert list((place / "state" / "colocate").iterdir()) == [], "the next time it begins anew"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.py"], "1 script for sets of 2"),
        (["a.py", "missing.py"], "there is no script 'missing.py'"),
        (["a.py", "a.py", "--seconds", "0"], "--seconds 0"),
        (["a.py", "a.py", "--seconds", "nan"], "--seconds nan"),
        (["a.py", "a.py", "--turn", "0"], "--turn 0"),
        (["a.py", "a.py", "--stress", "cache,pcie"], "over PCIe"),
        (["a.py", "a.py", "--stress", "heat"], "--stress heat"),
        (["a.py", "a.py", "--sample", "0"], "--sample 0"),
        (["a.py", "a.py", "--repeats", "1"], "--repeats 1"),
        (["a.py", "a.py", "--pairs", "--subsets", "3"], "both --pairs and --subsets 3"),
        (["a.py", "a.py", "--device", "cpu:999"], "cpu:999 does not exist"),
        (["a.py", "a.py 'x"], "is no command line"),
        (["a.py", "a.py", "--html", "no/where.html"], "does not exist"),
    ],
)
def test_what_cannot_work_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (place / "a.py").write_text("raise SystemExit(9)", encoding="utf-8")
    assert status(["colocate", *words]) in (2, 3)
    assert message in capsys.readouterr().err


def test_a_script_that_fails_is_named_with_its_last_lines(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "a.py").write_text("print('before')\nraise ValueError('a reason')", encoding="utf-8")
    assert status(["colocate", "a.py", "a.py"]) == 2
    error = capsys.readouterr().err
    assert "a.py failed with exit status 1" in error
    assert "before" in error
    assert "ValueError: a reason" in error


def test_a_script_that_does_not_train(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "a.py").write_text("print('nothing to do')", encoding="utf-8")
    assert status(["colocate", "a.py", "a.py"]) == 2
    assert "it has to import torch and train" in capsys.readouterr().err


def test_the_limit_is_the_memory_of_the_gpu_that_the_scripts_see(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Gpu(index, None, f"GPU-{index}", None, (index + 1) << 30, 0) for index in range(2))
    monkeypatch.setattr(nvml, "read_driver", lambda: Driver("580.65", "13.0", gpus))
    first, second = (Settings(device=f"cuda:{index}") for index in range(2))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert colocate.memory_bytes(first) == 1 << 30
    assert colocate.memory_bytes(second) == 2 << 30
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert colocate.memory_bytes(first) == 2 << 30
    assert colocate.memory_bytes(second) is None
    monkeypatch.setattr(nvml, "read_driver", lambda: Driver(problem="no driver"))
    with pytest.raises(EnvironmentUnusableError, match="no driver"):
        colocate.memory_bytes(first)


def test_names_are_unique() -> None:
    assert colocate.unique(["a.py", "b.py", "a.py", "a.py"]) == ["a.py", "b.py", "a.py #2", "a.py #3"]


@pytest.mark.slow
def test_real_scripts_alone_and_together(
    place: Path, monkeypatch: pytest.MonkeyPatch, servers: Servers
) -> None:
    """The second one ends after 200 steps, and is started again until the others have been measured."""
    for real in (run_together, run_sliced):
        monkeypatch.setattr(f"{real.__module__}.{real.__name__}", partial(real, begin=servers.start))
    (place / "train.py").write_text(TRAIN, encoding="utf-8")
    words = ["colocate", "train.py 100000000", "train.py 200", "--seconds", "0.05", "--repeats", "2"]
    assert status([*words, "--json", "o.json"]) == 0
    found = json.loads((place / "o.json").read_text(encoding="utf-8"))
    assert found["complete"]
    assert len(found["trials"]) == 8
    assert all(run["steps"] > 0 and run["memory_bytes"] > 0 for one in found["trials"] for run in one["runs"])
    packed = [one for one in found["trials"] if one["mode"] == "packed"]
    assert any(one["runs"][0]["alone_steps"] > 0 for one in packed), "while the other was halted"
    sliced = [one for one in found["trials"] if one["mode"] == "sliced"]
    assert [one["runs"] for one in sliced] == [[]] * 2, "it ends before two cycles are over"
    assert all(one["memory_bytes"] > 0 for one in found["jobs"])


def status(words: list[str]) -> object:
    """The exit status of ``gpuslice`` with ``words``."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code


def test_without_scripts_it_says_what_is_missing_in_one_pair_of_quotes(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(["colocate"]) == 2
    assert 'the argument "SCRIPT.py [ARGS]"... is missing' in capsys.readouterr().err
