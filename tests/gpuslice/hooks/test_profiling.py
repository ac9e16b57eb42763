"""Profiles of real scripts: what is recorded in the job's process, and the commands around it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from gpuslice.cli import main
from gpuslice.errors import UsageError
from gpuslice.profiler.recorder import Recording
from gpuslice.profiler.skew import Skew
from gpuslice.profiler.steps import Kind, analyse, classify
from gpuslice.runtime.trainable import skew_of_factory, tensor_sizes

from ...patience import PATIENCE_S
from ..conftest import Workshop

MIB = 1 << 20

#: 16 batches an epoch; an evaluation after each; parameters of 4 and 1 MiB and, frozen, of 64.
EPOCHS = """
import torch
from torch.utils.data import DataLoader

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.large = torch.nn.Parameter(torch.zeros(1 << 20))
        self.small = torch.nn.Parameter(torch.zeros(1 << 18))
        self.frozen = torch.nn.Parameter(torch.ones(1 << 24), requires_grad=False)

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(list(range(16)))
try:
    for epoch in range(5):
        for x in loader:
            optimizer.zero_grad()
            (model.large.sum() + model.small.sum()).backward()
            optimizer.step()
        with torch.no_grad():
            for x in loader:
                model.large.sum()
    print("all epochs")
finally:
    print("cleaned up")
"""
#: Every step needs 128 MiB for a while, and 32 MiB stay.
MEMORY = """
import torch, gpuslice
kept = torch.nn.Parameter(torch.ones(8 << 20))
optimizer = torch.optim.SGD([kept], lr=0.1)
for step in range(30):
    gpuslice.boundary()
    torch.ones(32 << 20).sum()
"""
STEPLESS = "import torch\nprint(torch.ones(3).sum())\n"


def profile_of(workshop: Workshop, source: str, steps: int) -> tuple[Recording, str]:
    """What a script recorded of itself, and its stdout."""
    workshop.write("train.py", source)
    path = workshop.directory / "profile.json"
    workshop.environ |= {"GPUSLICE_PROFILE": str(path), "GPUSLICE_PROFILE_STEPS": str(steps)}
    done = workshop.gpuslice_run("train.py")
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(path.read_bytes(), type=Recording), done.stdout


def test_steps_and_evaluations_are_told_apart(warm_workshop: Workshop) -> None:
    found, out = profile_of(warm_workshop, EPOCHS, 60)
    assert out == "cleaned up\n", "it ends in the fourth epoch, by an exception"
    assert len(found.interval_s) == 60
    evaluations = [number for number, grads in enumerate(found.without_grad) if grads]
    # The interval that ends an epoch has the evaluation and the first step of the next one.
    assert evaluations == [16, 32, 48]
    assert [found.batches[number] for number in (0, 16, 17)] == [1, 17, 1]
    times = analyse(found)
    # On a busy machine the warm-up takes longer, at most half of all intervals.
    settled = [number for number in evaluations if number >= times.warmup_steps]
    assert [number for number, kind in enumerate(classify(found)) if kind is Kind.EVALUATION] == settled
    assert settled[-2:] == [32, 48]
    assert times.phases["evaluation"].count == len(settled)
    assert 0 < times.overhead < 1
    assert found.memory is not None
    assert found.memory.tensors_bytes is not None
    assert 74 * MIB <= found.memory.tensors_bytes < 75 * MIB, "three parameters, two gradients"


def test_the_skew_is_of_what_is_trained(warm_workshop: Workshop) -> None:
    found, _ = profile_of(warm_workshop, EPOCHS, 3)
    assert found.skew is not None
    assert (found.skew.tensors, found.skew.bytes, found.skew.largest_bytes) == (2, 5 * MIB, 4 * MIB)
    assert found.skew.skew == pytest.approx(0.8)


def test_known_memory(warm_workshop: Workshop) -> None:
    found, _ = profile_of(warm_workshop, MEMORY, 20)
    memory = found.memory
    assert memory is not None
    assert memory.peak_bytes is not None
    assert memory.boundary_bytes is not None
    assert memory.peak_bytes - memory.boundary_bytes == pytest.approx(128 * MIB, abs=16 * MIB)
    assert memory.tensors_bytes == 32 * MIB
    assert memory.context_bytes is not None
    assert memory.boundary_bytes - memory.context_bytes >= 32 * MIB - MIB


def test_a_script_that_ends_before_leaves_what_there_was(warm_workshop: Workshop) -> None:
    found, out = profile_of(warm_workshop, EPOCHS, 1000)
    assert out == "all epochs\ncleaned up\n"
    assert len(found.interval_s) == 80
    none, _ = profile_of(warm_workshop, STEPLESS, 10)
    assert none.interval_s == []
    assert none.skew is None


def command(workshop: Workshop, *words: str) -> Any:
    return workshop.execute([sys.executable, "-m", "gpuslice", *words])


def test_the_command_reports_and_passes_the_exit_code_on(quick_workshop: Workshop) -> None:
    quick_workshop.write("train.py", EPOCHS.replace('print("cleaned up")', "raise SystemExit(7)"))
    done = command(
        quick_workshop, "profile", "--steps", "40", "--json", "p.json", "--html", "p.html", "train.py"
    )
    assert done.returncode == 7, done.stderr
    found = json.loads((quick_workshop.directory / "p.json").read_text())
    assert {"steps", "step_seconds", "warmup_steps", "memory", "overhead"} <= set(found)
    assert set(found["step_seconds"]) == {"median", "p10", "p90", "interval", "confidence", "jitter"}
    assert found["steps"] + found["warmup_steps"] + sum(p["count"] for p in found["phases"].values()) == 40
    assert found["step_seconds"]["p10"] <= found["step_seconds"]["median"] <= found["step_seconds"]["p90"]
    assert found["skew"]["tensors"] == 2
    assert {one["device"] for one in found["devices"]} >= {"cpu:0"}
    page = (quick_workshop.directory / "p.html").read_text()
    assert page.count("<svg") >= 2
    assert "http" not in page.replace("http-equiv", "")
    assert f"  steps:                {found['steps']} (" in done.stdout


FACTORIES = """
import torch

def tied():
    large = torch.nn.Linear(1 << 20, 1 << 20, bias=False)
    return torch.nn.ModuleList([large, torch.nn.Linear(4, 4, bias=False), large])

def nothing():
    return torch.nn.ReLU()

def text():
    return "model"

def needs(argument):
    return torch.nn.ReLU()

def fails():
    return torch.nn.Linear(3, 3).weight.tolist()
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_factories.py").write_text(FACTORIES, encoding="utf-8")
    (tmp_path / "no_python.py").write_text("model = (", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("factories")
def test_a_factory_costs_no_memory() -> None:
    found = skew_of_factory("some_factories:tied")
    assert (found.tensors, found.largest_bytes) == (2, 4 << 40), "4 TiB, and once although it is there twice"


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("some_factories", "names no factory"),
        ("some_factories:", "names no factory"),
        ("no_such_module:f", "cannot import no_such_module"),
        ("some_factories:absent", "has no factory 'absent'"),
        ("some_factories:text", "makes a str"),
        ("some_factories:nothing", "no trainable tensors"),
        ("some_factories:needs", "calling some_factories:needs without arguments failed: TypeError: needs"),
        ("some_factories:fails", r"failed: NotImplementedError: .*some_factories.py, line 18\)"),
        ("no_python:f", "importing no_python failed: SyntaxError"),
    ],
)
def test_what_is_no_factory_is_named(name: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        skew_of_factory(name)


@pytest.mark.usefixtures("factories")
def test_the_command_for_a_factory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["skew", "--json", str(tmp_path / "s.json"), "--model", "some_factories:tied"])
    assert ended.value.code == 0
    found = msgspec.json.decode((tmp_path / "s.json").read_bytes(), type=Skew)
    assert (found.tensors, found.consolidate) == (2, True)
    out = capsys.readouterr().out
    assert f"skew: {found.skew:.3f} (threshold 0.3): consolidate" in out
    assert "resnet50 0.09" in out


def test_the_skew_of_a_script_that_makes_no_step(quick_workshop: Workshop) -> None:
    quick_workshop.write("train.py", "import torch\nraise OSError('no data')\n")
    done = command(quick_workshop, "skew", "train.py")
    told = done.stderr.splitlines()[-2:]
    assert done.returncode == 2, done.stderr
    assert told[0] == "gpuslice: the script's optimizers made no step"
    assert "exit code 1" in told[1]


@pytest.mark.parametrize(
    "words", [["skew"], ["profile"], ["profile", "--steps", "0", "x.py"], ["skew", "no.py"]]
)
def test_wrong_command_lines(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("gpuslice: ")


@pytest.mark.slow
def test_the_command_for_a_script(quick_workshop: Workshop) -> None:
    quick_workshop.write("train.py", EPOCHS)
    done = command(quick_workshop, "skew", "train.py", "--json", "s.json")
    assert done.returncode == 0, done.stderr
    assert json.loads((quick_workshop.directory / "s.json").read_text())["skew"] == pytest.approx(0.8)
    nothing = command(quick_workshop, "profile", "--", "true")
    assert (nothing.returncode, nothing.stderr.splitlines()[0]) == (
        2,
        "gpuslice: nothing was recorded (exit status 0)",
    )


@pytest.mark.slow
def test_a_signal_reaches_the_script_and_what_was_recorded_is_shown(quick_workshop: Workshop) -> None:
    waiting = "import signal\nprint('ready', flush=True)\nsignal.pause()\n"
    on_signal = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
    quick_workshop.write("train.py", on_signal + EPOCHS.replace('print("all epochs")', "pass") + waiting)
    words = [sys.executable, "-m", "gpuslice", "profile", "--steps", "1000", "train.py"]
    with quick_workshop.start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["cleaned up\n", "ready\n"]
        process.terminate()
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3, err
    assert "  steps:                " in out


def test_shared_and_frozen_parameters() -> None:
    one, frozen = torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(torch.zeros(9), requires_grad=False)
    half = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    assert tensor_sizes([one, frozen, one, half]) == [20, 6]


class FakeEvent:
    """A CUDA event on a clock on which every record takes 2 ms."""

    made: Sequence[FakeEvent] = ()

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms = 0.0

    def record(self) -> None:
        FakeEvent.made = [*FakeEvent.made, self]
        self.at_ms = 2.0 * len(FakeEvent.made)

    def synchronize(self) -> None:
        assert self is FakeEvent.made[-1], "the last one is waited for"

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.at_ms - self.at_ms


def test_the_memory_of_a_gpu_is_the_allocator_s_and_the_driver_s(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuslice.profiler import gpu_measuring

    torch_bytes = {"memory_allocated": 60, "memory_reserved": 100, "max_memory_allocated": 90}
    resets: list[int] = []
    for name in torch_bytes:
        monkeypatch.setattr(torch.cuda, name, lambda index, name=name: torch_bytes[name] * MIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    held_mib = [500]
    monkeypatch.setattr(gpu_measuring.CudaMemory, "_held_bytes", lambda self: held_mib[0] * MIB)
    meter = gpu_measuring.CudaMemory(1)
    meter.sample()
    torch_bytes["memory_allocated"] = 70
    meter.sample()
    meter.sample()
    held_mib[0], meter.tensors_bytes = 530, 65 * MIB
    found = meter.report()
    assert resets == [1]
    assert (found.peak_bytes, found.boundary_bytes) == (90 * MIB, 70 * MIB)
    assert (found.reserved_bytes, found.context_bytes) == (30 * MIB, 400 * MIB)
    assert found.unaccounted_bytes == (530 - 65 - 30 - 400) * MIB


def test_the_clock_of_a_gpu_is_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuslice.profiler.gpu_measuring import CudaClock

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    clock = CudaClock()
    for _ in range(4):
        clock.mark()
    assert clock.intervals_s() == pytest.approx([0.002] * 3)
