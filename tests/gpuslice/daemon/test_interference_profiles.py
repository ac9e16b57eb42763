"""What the co-location lab found, as a scheduler reads it: checked at the door."""

from __future__ import annotations

import os
import sys
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from gpuslice.cli.up import command
from gpuslice.daemon import daemon
from gpuslice.daemon.interference_profiles import by_scripts, read_profiles
from gpuslice.daemon.scheduler_setup import Setup, options
from gpuslice.errors import UsageError
from gpuslice.profiler.colocation.plan import Plan
from gpuslice.profiler.colocation.result import make_result
from gpuslice.profiler.colocation.trial import Run, Trial
from gpuslice.sched_core.interference import slowdown
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.live.scheduler import Scheduler
from gpuslice.sched_core.policies.gandiva.live_packing import Packing
from gpuslice.types import DeviceName

from ...patience import PATIENCE_S

RANK = Path(__file__).parents[2] / "sched_core" / "rank.py"


def write(directory: Path, content: Any) -> Path:
    path = directory / "lab.json"
    path.write_bytes(content if isinstance(content, bytes) else msgspec.json.encode(content))
    return path


def pair(**changes: Any) -> dict[str, Any]:
    one = {
        "members": ["jobs/a.py", "b.py --batch '6 4'"],
        "mode": "packed",
        "measured": True,
        "normalized": [0.9, 0.5],
        "error": [0.05, None],
    }
    return {**one, **changes}


def lab(*sets: dict[str, Any], **changes: Any) -> dict[str, Any]:
    names = ["jobs/a.py", "b.py --batch '6 4'", "jobs/a.py #2"]
    return {"names": names, "sets": list(sets), **changes}


def test_pairs_are_found_by_script_and_arguments_with_their_errors(tmp_path: Path) -> None:
    same = pair(members=["jobs/a.py", "jobs/a.py #2"], normalized=[0.8, 0.7], error=[None, None])
    sliced = pair(mode="sliced", normalized=[0.5, 0.5])
    found = by_scripts(read_profiles(write(tmp_path, lab(sliced, pair(), same))))
    assert {scripts: round(exp(prior.log), 6) for scripts, prior in found.items()} == {
        ("a.py", "b.py --batch 6 4"): 0.9,
        ("b.py --batch 6 4", "a.py"): 0.5,
        ("a.py", "a.py"): 0.8,
    }
    # 0.05 by the mean is 0.056, so 0.1.
    assert found["a.py", "b.py --batch 6 4"].error == 0.1
    assert found["b.py --batch 6 4", "a.py"].error == 0.3


def test_an_error_is_relative_to_the_mean(tmp_path: Path) -> None:
    found = read_profiles(write(tmp_path, lab(pair(error=[0.2, 0.2]))))
    assert found[0].prior.error == pytest.approx(0.2 / 0.9)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is no result of the lab"),
        (b"\xff", "is no result of the lab"),
        (b"[" * 100_000, "is no result of the lab"),
        ([], "is no result of the lab"),
        ({"step_seconds": None}, "is the profile of one job, not of pairs"),
        (lab(), "says nothing of two scripts together"),
        (lab(pair(mode="sliced")), "says nothing of two scripts together"),
        (lab(pair(normalized=[0.9])), "is not possible"),
        (lab(pair(normalized=[0.0, 1.0])), "is not possible"),
        (lab(pair(members=["jobs/a.py", "c.py"])), "is not possible"),
        (lab(pair(error=[0.1])), "is not possible"),
        (lab(pair(error=[-0.1, 0.1])), "an error of .* is not possible"),
        (lab(pair(normalized="fast")), "is no result of the lab"),
    ],
)
def test_what_is_no_such_file_is_refused_by_name(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        read_profiles(write(tmp_path, content))
    assert "gpuslice colocate --json" in refused.value.remedy


def test_what_the_lab_writes_is_understood(tmp_path: Path) -> None:
    plan = Plan(2, 2, 2, (), None)
    trials = []
    for task in plan.remaining([]):
        packed = task.mode == "packed"
        run = Run(
            steps=180.0 if packed else 200.0, seconds=10.0, starts=1, memory_bytes=None, step_seconds=()
        )
        trials.append(Trial(task.round, task.members, task.mode, 12.0, (run,) * len(task.members)))
    result = make_result(["a.py", "b.py 3"], "cpu:0", 10.0, 2.0, plan, trials, None)
    found = by_scripts(read_profiles(write(tmp_path, result)))
    assert {scripts: exp(prior.log) for scripts, prior in found.items()} == pytest.approx(
        {("a.py", "b.py 3"): 0.9, ("b.py 3", "a.py"): 0.9}
    )


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.json cannot be read: No such file"):
        read_profiles(tmp_path / "none.json")


def test_a_scheduler_that_packs_begins_with_them_and_no_other_takes_them(tmp_path: Path) -> None:
    profiles = read_profiles(write(tmp_path, lab(pair())))
    devices = (DeviceName("cpu", 0),)
    setup = Setup(devices, "rr", options("rr", [], None, pack=True), profiles=profiles)
    assert msgspec.json.decode(msgspec.json.encode(setup), type=Setup) == setup, "a journal keeps them"
    policy = setup.make_policy()
    assert isinstance(policy, Packing)
    assert policy.priors == by_scripts(profiles)
    with pytest.raises(UsageError, match="packs no jobs"):
        Setup(devices, "rr", profiles=profiles).make_policy()


def test_a_live_scheduler_weighs_them_against_what_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its figure follows from samples and prior; the same samples alone give another, or none."""
    names = ["rank.py first", "rank.py second"]
    measured = pair(members=names, normalized=[0.9, 0.9], error=[None, None])
    setups: list[Setup] = []
    monkeypatch.setattr(daemon, "serve", lambda directory, setup, ready, **rest: setups.append(setup))
    nothing_stated = SimpleNamespace(get_parameter_source=lambda name: None)
    command(
        cast(Any, nothing_stated),
        devices="null:1",
        quantum="500ms",
        switch_share=0.0,
        pack=True,
        profiles=write(tmp_path, lab(measured, names=names)),
        foreground=True,
        state_dir=tmp_path / "state",
    )
    core = setups[0].make_core()
    scheduler = Scheduler(core, tmp_path / "s")
    try:
        for name in names:
            program = Program((sys.executable, str(RANK), str(10**9), "0"), "/", dict(os.environ))
            scheduler.submit(JobSpec(id=name.split()[1], submit_s=0.0, devices=1, model=name), program)
        first, second = core.jobs["first"], core.jobs["second"]
        known = core.allocation.throughput.slowdown
        assert scheduler.run(lambda: known(first) is not None, timeout_s=PATIENCE_S), list(first.history)
        alone, together = (core.allocation.throughput.samples(first, beside) for beside in (None, second))
        prior = by_scripts(setups[0].profiles)[names[0], names[1]]
        assert known(first) == slowdown(alone, together, prior)
        assert known(first) != slowdown(alone, together)
    finally:
        scheduler.close()
