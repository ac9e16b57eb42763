"""Whose snapshot it is: killed and started again, a training ends like an undisturbed one, or is refused.

A "life" is a process as far as gpuslice can tell: a runtime of its own, arguments, a script's text. Scripts
are functions here. A kill is an exception after which the store is left as it is.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gpuslice
from gpuslice.config import Settings
from gpuslice.errors import RefusedSnapshotError, SuspendedStateError, UsageError
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.runtime import trainings
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.job import Job
from gpuslice.runtime.runtime import Runtime

EPOCHS, BATCHES = 2, 3
STEPS = EPOCHS * BATCHES
JOB = "k"
SCHEDULER = "ipc:///nowhere/socket"


class KilledError(BaseException):
    """The process is gone."""


class Host:
    """A machine on which processes begin and die; ``err`` has the lines of the last life."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        self._directory = directory
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self.err = ""
        self.process: Runtime

    def live(
        self,
        script: Callable[[Callable[[], None]], Any],
        *arguments: str,
        name: str = "train.py",
        text: str = "",
        kill_at: int = 0,
        well: bool = True,
        driver: Sequence[str] = (),
        **settings: Any,
    ) -> Any:
        """Return what a script does, or None if it is killed at that step.

        ``driver``: the command of a script that executes it in its own process.
        """
        self._capsys.readouterr()
        path = self._directory / name
        path.write_text(text)
        self._monkeypatch.setattr(sys.modules["__main__"], "__file__", str(path), raising=False)
        self._monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
        self._monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        self._monkeypatch.setattr(sys, "orig_argv", [sys.executable, *(driver or sys.argv)])
        settings = {"job": JOB, **settings}
        launched = "1" if "command" in settings else str(os.getpid())
        self._monkeypatch.setenv("GPUSLICE_LAUNCH", launched)
        self.process = process = Runtime(
            Settings(ramdisk_dir=str(self._directory / "ramdisk"), ramdisk_limit="64M", **settings),
            RankIdentity(),
            BoundaryCounter(),
        )
        self._monkeypatch.setattr("gpuslice.runtime.job.runtime", lambda: process)
        self._monkeypatch.setattr("gpuslice.runtime.trainings.ended_well", lambda: well)
        steps = count(1)

        def step() -> None:
            if next(steps) == kill_at:
                raise KilledError

        try:
            result = script(step)
            trainings.close(process)
        except KilledError:
            result = None
            process.checkpoints.settle()
            if process.storage.is_open:
                process.storage.store.abandon()
        except BaseException:
            self._monkeypatch.setattr("gpuslice.runtime.trainings.ended_well", lambda: False)
            trainings.close(process)
            raise
        finally:
            self.err = self._capsys.readouterr().err
        return result

    @property
    def stores(self) -> list[str]:
        """The names of what is left."""
        return sorted(path.name for path in (self._directory / "ramdisk").iterdir() if path.name != "lock")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Host:
    return Host(tmp_path, monkeypatch, capsys)


def train(step: Callable[[], None], seed: int, job_name: str | None = None) -> str:
    """One training, saved at every step; its digest."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = torch.randn(BATCHES, 5, 3)
    job = gpuslice.attach(job_name, model=model, optimizer=optimizer)
    job.state.setdefault("losses", [])
    for _epoch in job.epochs(EPOCHS):
        for batch in job.batches(rows):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            job.state["losses"].append(loss.item())
            job.checkpoint()
            step()
    return repr(([p.tolist() for p in model.parameters()], job.state["losses"]))


def fold(seed: int) -> Callable[[Callable[[], None]], str]:
    return lambda step: train(step, seed)


def folds(step: Callable[[], None]) -> list[str]:
    return [train(step, seed) for seed in range(3)]


_DIGESTS: list[str] = []


@pytest.fixture
def expected(host: Host) -> list[str]:
    """The digests of seeds 0, 1 and 2, from trainings that only the first test makes."""
    if not _DIGESTS:
        _DIGESTS.extend(host.live(folds, job="alone"))
        assert len({*_DIGESTS}) == 3
        assert "attached again: training 1 of this process ends, and 2 begins" in host.err
    return list(_DIGESTS)


def test_a_killed_training_goes_on_and_says_of_which_run(host: Host, expected: list[str]) -> None:
    assert host.live(fold(0), "--fold", "0", kill_at=4) is None
    assert host.live(fold(0), "--fold", "0") == expected[0]
    assert f"job {JOB} goes on from boundary" in host.err
    assert host.err.endswith(": train.py --fold 0\n")
    assert host.stores == []


@pytest.mark.parametrize("kind", ["arguments", "text", "script", "torch", "attach"])
def test_a_stranger_s_snapshot_is_refused_and_stays(
    host: Host, expected: list[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    assert host.live(fold(0), "0", kill_at=5) is None
    other: dict[str, Any] = {"text": {"text": "# edited"}, "script": {"name": "other.py"}}.get(kind, {})
    words = ("1",) if kind in ("arguments", "attach") else ("0",)
    with monkeypatch.context() as patch:
        if kind == "torch":
            patch.setattr(torch, "__version__", "9.9.9+cpu")
        with pytest.raises(RefusedSnapshotError, match="job k has a snapshot") as refusal:
            host.live(folds if kind == "attach" else fold(1), *words, **other)
    assert all(way in refusal.value.remedy for way in ("--fresh", "--job", "--continue-anyway"))
    # It was left alone.
    assert host.live(fold(0), "0") == expected[0]
    assert "goes on from boundary" in host.err


def test_fresh_begins_anew_and_says_so(host: Host, expected: list[str]) -> None:
    assert host.live(fold(0), "0", kill_at=5) is None
    assert host.live(fold(1), "1", fresh=True) == expected[1]
    assert "job k begins anew; removed: boundary" in host.err
    assert host.live(fold(0), "0", fresh=True) == expected[0]
    assert "removed: nothing, there was no snapshot" in host.err


def test_continue_anyway_goes_on_from_the_stranger_s(host: Host, expected: list[str]) -> None:
    """As when the script was mended; here the seed tells that it was the former one's state."""
    assert host.live(fold(0), "0", text="# wrong", kill_at=5) is None
    assert host.live(fold(0), "0", text="# right", continue_anyway=True) == expected[0]
    assert "goes on from boundary" in host.err
    assert host.live(fold(0), "0", text="# right", kill_at=5) is None
    mixed = host.live(fold(0), "0", "--verbose", text="# right", continue_anyway=True)
    assert mixed == expected[0]


@pytest.mark.parametrize("settings", [{"command": "a loop"}, {"socket": SCHEDULER}])
def test_a_loop_over_folds_in_one_command(host: Host, expected: list[str], settings: dict[str, str]) -> None:
    """Each time the command begins with its first process; whose snapshot is not there begins anew."""
    choose, found = random.Random(1), ["", "", ""]
    for kill in (1, 0, 2, None):
        for seed in range(3):
            kill_at = choose.randrange(2, STEPS) if seed == kill else 0
            result = host.live(fold(seed), "--fold", str(seed), kill_at=kill_at, **settings)
            if result is None:
                break
            found[seed] = result
    assert found == expected


def test_another_process_of_a_command_leaves_the_snapshot_alone(host: Host, expected: list[str]) -> None:
    command = {"command": "a.py; b.py"}
    assert host.live(fold(1), name="b.py", kill_at=4, **command) is None
    assert host.live(fold(0), name="a.py", **command) == expected[0]
    assert "job k keeps the snapshot of boundary" in host.err
    assert len(host.err.splitlines()) == 1
    assert len(host.stores) == 1
    assert host.live(fold(1), name="b.py", **command) == expected[1]
    assert "goes on from boundary" in host.err
    assert host.stores == []


@pytest.mark.parametrize("kill_at", range(1, 3 * STEPS + 1, 3))
def test_folds_of_one_process_each_go_on_from_their_own(
    host: Host, expected: list[str], kill_at: int
) -> None:
    assert host.live(folds, kill_at=kill_at) is None
    assert host.live(folds, kill_at=STEPS + 2) is None
    assert host.live(folds) == expected
    assert host.stores == [], "what waited for its training goes with the last of them"


def test_a_later_fold_s_snapshot_waits_for_it(host: Host, expected: list[str]) -> None:
    assert host.live(folds, kill_at=2 * STEPS + 4) is None
    seen: list[str] = []

    def counting(step: Callable[[], None]) -> list[str]:
        return folds(lambda: seen.append("") or step())  # type: ignore[func-returns-value]

    assert host.live(counting) == expected
    assert len(seen) == 2 * STEPS + STEPS - 4
    assert "keeps the snapshot of boundary" in host.err
    assert "its training 3" in host.err


def test_scripts_that_a_driver_executes_in_its_process(host: Host, expected: list[str]) -> None:
    """As by ``runpy``, without a launcher: a healthy command is never refused because it begins again."""

    def second(step: Callable[[], None]) -> str:
        train(lambda: None, 2)
        return train(step, 1)

    assert host.live(second, name="b.py", driver=["driver.py"], kill_at=3) is None
    assert host.live(fold(0), name="a.py", driver=["driver.py"], kill_at=3) is None
    assert host.live(fold(0), name="a.py", driver=["driver.py"]) == expected[0]
    assert host.live(fold(0), name="a.py", driver=["driver.py"], kill_at=3) is None
    with pytest.raises(RefusedSnapshotError):
        host.live(fold(1), name="b.py", driver=["other.py"])


def test_folds_that_the_script_names(host: Host, expected: list[str]) -> None:
    def script(step: Callable[[], None]) -> list[str]:
        return [train(step, seed, f"fold-{seed}") for seed in range(3)]

    assert host.live(script, kill_at=STEPS + 3, job="") is None
    assert host.stores == ["fold-1.r0"]
    assert host.live(script, job="") == expected
    assert "job fold-1 goes on from" in host.err
    assert host.stores == []


def test_a_finished_training_is_never_the_start_of_the_next(host: Host, expected: list[str]) -> None:
    """Killed while it evaluates, fold 0 leaves nothing for fold 1, which only a variable tells from it."""

    def then_evaluate(seed: int) -> Callable[[Callable[[], None]], str]:
        def script(step: Callable[[], None]) -> str:
            digest = train(step, seed)
            job = host.process.attached
            assert isinstance(job, Job)
            for _ in job.batches("ab"):
                assert not job.checkpoint()
                step()
            return digest

        return script

    assert host.live(then_evaluate(0), kill_at=STEPS + 1) is None
    assert host.live(then_evaluate(1)) == expected[1]
    assert "goes on" not in host.err


def test_a_finished_training_whose_process_fails_begins_anew(host: Host, expected: list[str]) -> None:
    def fails(step: Callable[[], None]) -> str:
        train(step, 0)
        raise ValueError

    with pytest.raises(ValueError):
        host.live(fails)
    assert host.live(fold(0)) == expected[0]
    assert "goes on" not in host.err


def test_a_stage_after_the_first_is_saved_again(host: Host) -> None:
    def stages(step: Callable[[], None]) -> list[int]:
        model = nn.Linear(1, 1)
        job = gpuslice.attach(model=model)
        job.state.setdefault("seen", [])
        for stage in (0, 10):
            for epoch in job.epochs(2):
                for batch in job.batches(range(2)):
                    job.state["seen"].append(100 * stage + 10 * epoch + batch)
                    job.checkpoint()
                    step()
                if stage == 0 and epoch == 0:
                    break
        return list(job.state["seen"])

    expected = host.live(stages, job="alone")
    assert expected == [0, 1, 1000, 1001, 1010, 1011]
    for kill_at in range(2, 7):
        assert host.live(stages, kill_at=kill_at) is None
        assert host.live(stages) == expected
        assert "goes on from" in host.err


def test_killed_between_two_trainings(host: Host, expected: list[str]) -> None:
    def script(step: Callable[[], None]) -> list[str]:
        first = train(lambda: None, 0)
        step()
        return [first, train(step, 1)]

    assert host.live(script, kill_at=1) is None
    assert host.live(script) == expected[:2]
    assert "goes on" not in host.err


def early_stopping(step: Callable[[], None]) -> Any:
    """As docs/training-scripts.md has it: patience, the best weights, accumulation, an average."""
    torch.manual_seed(4)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rows = torch.randn(4, 5, 3)
    job = gpuslice.attach(model=model, optimizer=optimizer)
    state = job.state
    state.setdefault("best", float("inf"))
    state.setdefault("bad", 0)
    state.setdefault("micro", 0)
    ema = state.setdefault("ema", {name: p.detach().clone() for name, p in model.named_parameters()})
    for _epoch in job.epochs(20):
        total = 0.0
        for batch in job.batches(rows):
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean() + 0.1 * torch.rand(())
            loss.backward()
            state["micro"] += 1
            if state["micro"] % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
                for name, parameter in model.named_parameters():
                    ema[name].lerp_(parameter.detach(), 0.1)
            state["total"] = state.get("total", 0.0) + loss.item()
            job.checkpoint()
            step()
        total = state.pop("total")
        if total < state["best"]:
            state["best"], state["bad"] = total, 0
            state["best_weights"] = [p.detach().clone() for p in model.parameters()]
        else:
            state["bad"] += 1
        if state["bad"] == 2:
            break
    weights = [p.tolist() for p in [*model.parameters(), *state["best_weights"], *ema.values()]]
    return weights, state["best"], state["micro"], float(torch.rand(()))


def test_the_script_s_own_variables_come_back(host: Host) -> None:
    expected = host.live(early_stopping, job="alone")
    micro = expected[2]
    assert 12 < micro < 80, "it stopped early, and not at once"
    for kill_at in random.Random(7).sample(range(2, micro), 2):
        assert host.live(early_stopping, kill_at=kill_at) is None
        assert host.live(early_stopping, kill_at=2) is None
        assert host.live(early_stopping) == expected


def test_the_first_loop_raises_when_it_goes_on(host: Host) -> None:
    def script(step: Callable[[], None]) -> None:
        first = gpuslice.attach(model=nn.Linear(2, 2))
        epochs, batches = first.epochs(3), first.batches("abc")
        next(epochs), next(batches)
        model = nn.Linear(2, 2)
        second = gpuslice.attach(model=model)
        for going_on in (epochs, batches, first.epochs(1), first.batches("a")):
            with pytest.raises(UsageError, match=r"another gpuslice\.attach has replaced its job"):
                next(going_on)
        for call in (first.suspend, first.resume, first.checkpoint):
            with pytest.raises(UsageError, match="was detached"):
                call()
        assert list(second.epochs(2)) == [0, 1]
        with second.suspended():
            pass
        assert model.weight.isfinite().all()

    host.live(script)


@pytest.mark.parametrize("job_name", ["", JOB])
def test_a_suspended_job_is_resumed_when_it_is_replaced(host: Host, job_name: str) -> None:
    def script(step: Callable[[], None]) -> None:
        for _ in range(3):
            model = nn.Linear(50, 50)
            before = model.weight.tolist()
            job = gpuslice.attach(model=model)
            job.suspend()
            again = gpuslice.attach(model=nn.Linear(50, 50))
            assert model.weight.tolist() == before
            with pytest.raises(SuspendedStateError):
                again.resume()

    host.live(script, job=job_name)


def test_detach(host: Host, expected: list[str]) -> None:
    def script(step: Callable[[], None]) -> str:
        model = nn.Linear(2, 2)
        job = gpuslice.attach(model=model)
        for _ in job.batches("ab"):
            job.checkpoint()
        host.process.checkpoints.settle()
        assert host.process.storage.store.boundaries
        job.suspend()
        job.detach()
        job.detach()
        assert model.weight.isfinite().all()
        assert host.process.attached is None
        assert not host.process.storage.store.boundaries, "nobody goes on from a training that was given up"
        with pytest.raises(UsageError, match=r"job\.detach\(\) was called"):
            next(job.epochs(1))
        return train(step, 1)

    assert host.live(script) == expected[1]
    assert "attached again" not in host.err


def test_the_same_cell_again_with_checkpoints_under_way(host: Host) -> None:
    cell = "job = gpuslice.attach(model=nn.Linear(300, 300))\nfor _ in job.batches('abc'): job.checkpoint()"

    def script(step: Callable[[], None]) -> None:
        names = {"gpuslice": gpuslice, "nn": nn}
        for _ in range(3):
            exec(compile(cell, "<cell>", "exec"), names)  # noqa: S102 - as a notebook does

    host.live(script)
    assert host.err.count("attached again") == 2


def test_a_script_that_attaches_nothing_leaves_the_snapshot_alone(host: Host, expected: list[str]) -> None:
    assert host.live(fold(0), kill_at=4) is None

    def parks(step: Callable[[], None]) -> None:
        model = nn.Linear(2, 2)
        host.process.suspension.suspend(explicit=False)
        host.process.suspension.resume()
        del model

    host.live(parks, name="other.py")
    assert host.live(fold(0)) == expected[0]
    assert "goes on from boundary" in host.err


def test_what_cannot_be_saved_is_refused_when_it_is_set(host: Host) -> None:
    def script(step: Callable[[], None]) -> None:
        model = nn.Linear(2, 2)
        state = gpuslice.attach(model=model, best=1.0).state
        assert dict(state) == {"best": 1.0}
        for name, value, words in (
            ("call", train, r"job\.state\['call'\] is a function"),
            ("net", model, r"job\.state\['net'\] is a Linear"),
            ("nets", {"a": [model]}, r"job\.state\['nets'\]\['a'\]\[0\] is a Linear"),
            ("graph", model(torch.ones(2)), "part of an autograd graph"),
            ("model", 1, "'model' is the name of an attached object"),
            ("gpuslice.rng", 1, r"cannot have the name 'gpuslice\.rng'"),
        ):
            with pytest.raises(UsageError, match=words):
                state[name] = value
            with pytest.raises(UsageError, match=words):
                state.update({name: value})
        assert dict(state) == {"best": 1.0}

    host.live(script)


def test_containers_of_the_state_keep_their_kinds(host: Host) -> None:
    values = {
        "window": deque([1.0, 2.0], maxlen=2),
        "counts": Counter("abca"),
        "order": OrderedDict(b=1, a=[torch.ones(2)]),
        "default": defaultdict(int, a=1),
        "set": {1, 2},
        "array": np.arange(3),
        "nothing": None,
    }

    def script(step: Callable[[], None]) -> list[str]:
        state = gpuslice.attach(model=nn.Linear(2, 2)).state
        for name, value in values.items():
            state.setdefault(name, value)
        job = host.process.attached
        assert isinstance(job, Job)
        for batch in job.batches(range(4)):
            state["window"].append(batch)
            state["counts"][str(batch)] += 1
            state["default"][batch] += 1
            state["set"].add(batch)
            job.checkpoint()
            step()
        return [f"{name}: {value!r}" for name, value in state.items()]

    whole = host.live(script, job="alone")
    assert whole[0] == "window: deque([2, 3], maxlen=2)"
    values["window"], values["counts"] = deque(maxlen=2), Counter("abca")
    values["default"], values["set"] = defaultdict(int, a=1), {1, 2}
    assert host.live(script, kill_at=3) is None
    assert host.live(script) == whole


def test_restore_by_path_asks_nobody(host: Host) -> None:
    paths: list[Path] = []

    def script(step: Callable[[], None]) -> None:
        job = gpuslice.attach(model=nn.Linear(2, 2))
        job.state["count"] = 3
        paths.append(job.suspend().path)
        raise KilledError

    def other(step: Callable[[], None]) -> None:
        assert gpuslice.restore(paths[0], model=nn.Linear(2, 2), count=0)["count"] == 3
        job = gpuslice.attach(model=nn.Linear(2, 2))
        job.restore(paths[0])
        assert job.state["count"] == 3

    host.live(script)
    host.live(other, "others", name="other.py", job="")


def test_a_script_that_attaches_nothing_says_at_its_second_start_that_it_begins_anew(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = count(1)

    def plain(step: Callable[[], None]) -> None:
        monkeypatch.setenv("GPUSLICE_LAUNCH", f"run {next(runs)}")
        trainings.note_start(host.process)
        trainings.note_start(host.process)  # a rank that the process has started
        step()

    def attaches(step: Callable[[], None]) -> str:
        plain(lambda: None)
        return train(step, 0)

    def fails(step: Callable[[], None]) -> None:
        plain(step)
        host.process.suspension.suspend(explicit=False)
        host.process.suspension.resume()
        raise ValueError

    line = f"gpuslice: job {JOB} begins anew: its run of "
    host.live(plain, kill_at=1)
    assert host.err == ""
    with pytest.raises(ValueError):
        host.live(fails)
    assert host.err.startswith(line)
    host.live(plain)
    assert host.err.startswith(line)
    assert len(host.err.splitlines()) == 1
    assert host.stores == [], "it has ended well"
    host.live(plain, kill_at=1)
    assert [info.alive for info in host.process.storage.ramdisk.collect()] == [False]
    assert host.stores == []
    host.live(attaches, kill_at=4)
    assert host.err == ""
    host.live(plain, kill_at=1, name="other.py")
    assert host.err == ""
    host.live(attaches)
    assert "goes on from" in host.err
    assert "begins anew" not in host.err
