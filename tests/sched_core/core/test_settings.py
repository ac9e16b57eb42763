"""Settings that change while the scheduler runs: policy, its options, quotas and the switch share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from gpuslice import wire
from gpuslice.errors import ConfigError, UsageError
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import SettingsChanged, Submitted
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policies.rr import RoundRobin
from gpuslice.sched_core.policy import Plan, Policy, Start, View

from ..driver import PROGRAM, QUANTUM_S, Driver, Scripted, notices, picture, told


class Uncopied(Scripted):
    """A policy that cannot be copied, and so cannot plan by priority."""

    name = "uncopied"

    def __deepcopy__(self, memo: dict[int, object]) -> Policy:
        raise TypeError


class Raises:
    def __init__(self) -> None:
        raise RuntimeError("no such file")


class Shares(Scripted):
    """Puts all jobs on the first device."""

    def plan(self, view: View) -> Plan:
        return Plan([Start(job.id, (0,), shared=True) for job in view.waiting()])


OWN = {"uncopied": Uncopied, "raises": Raises}


def make(name: str, options: Mapping[str, str]) -> Policy:
    return OWN[name]() if name in OWN else make_policy(name, options)  # type: ignore[return-value]


def driver(device_count: int = 1, policy: Policy | None = None, **limits: Any) -> Driver:
    return Driver(device_count, policy, make_policy=make, **limits)


def change(policy: str, **options: str) -> SettingsChanged:
    return SettingsChanged(policy=policy, options=options)


def same(one: Core, other: Core) -> bool:
    return picture(one) == picture(other)


def test_a_new_policy_begins_with_what_jobs_have_used() -> None:
    there = driver(policy=make_policy("fifo"))
    there.running_pair()
    there.now_s += 5.0
    there.progress("a", 20)
    commands = there.do(change("las", quantum_s="1"))
    assert told(commands, wire.Suspend) == [("a", 0, wire.Suspend(epoch=1, stop_at=21))], "b has had nothing"
    there.parked("a", 21)
    there.resumed("b")
    assert (there.state("a"), there.state("b")) == (JobState.SUSPENDED, JobState.RUNNING)
    assert there.core.jobs["a"].service_s == pytest.approx(5.0)
    assert there.core.ledger.policy == there.core.allocation.planning.policy == "las"
    assert same(there.replayed(make_policy("fifo")), there.core)


def test_a_quantum_counts_for_the_slice_that_has_begun() -> None:
    there = driver()
    there.running_pair()
    there.do(change("rr", quantum_s=str(3 * QUANTUM_S)))
    assert told(there.wake(), wire.Suspend) == []
    assert [job for job, _, _ in told(there.wake(2 * QUANTUM_S), wire.Suspend)] == ["a"]


def test_each_priority_has_the_new_policy() -> None:
    there = driver(2)
    for name, priority in (("a", 0), ("b", 0), ("c", 1)):
        there.do(Submitted(JobSpec(id=name, submit_s=there.now_s, priority=priority), PROGRAM))
        there.hello(name)
        if name != "c":
            there.resumed(name)
            there.progress(name, 10)
    left = next(name for name in "ab" if there.state(name) is JobState.SUSPENDING)
    there.parked(left, 11)
    there.resumed("c")
    there.do(change("fifo"))
    assert told(there.wake(5 * QUANTUM_S), wire.Suspend) == [], "in neither priority there are slices"
    priorities = there.core.allocation.planning.priorities
    assert {priorities.policy_of(job).name for job in there.core.jobs.values()} == {"fifo"}


@pytest.mark.parametrize(
    ("event", "error", "said"),
    [
        (change("las", quantum="1"), ConfigError, "no option 'quantum'"),
        (change("lass"), ConfigError, "no policy 'lass'"),
        (change("las", quantum_s="soon"), ConfigError, "quantum_s=soon"),
        (change("uncopied"), UsageError, "job g has a priority"),
        (SettingsChanged(quotas={"t": 1}), UsageError, "job g asks for 2 devices"),
        (SettingsChanged(switch_share=1.0), UsageError, "not a share of the time"),
    ],
)
def test_what_is_impossible_changes_nothing(
    event: SettingsChanged, error: type[Exception], said: str
) -> None:
    there = driver(2, quotas={"t": 2})
    there.do(Submitted(JobSpec(id="g", submit_s=0.0, devices=2, tenant="t", priority=3), PROGRAM))
    there.hello("g")
    before, share = picture(there.core), there.core.state.switch_costs.share
    possible = SettingsChanged("rr", {"quantum_s": "9"}, {"t": 4}, 0.5)
    fields = {name: value for name, value in msgspec.structs.asdict(event).items() if value is not None}
    with pytest.raises(error, match=said):
        there.do(msgspec.structs.replace(possible, **fields))
    assert picture(there.core) == before
    assert there.core.state.switch_costs.share == share
    assert there.core.allocation.quotas.tenants["t"].most == 2
    assert isinstance(there.core.allocation.planning.priorities.policy_of(there.core.jobs["g"]), RoundRobin)


def test_a_core_without_other_policies_says_so() -> None:
    with pytest.raises(UsageError, match="one policy only"):
        Driver().do(change("fifo"))


def test_jobs_beyond_a_new_quota_park_and_wait_for_their_part() -> None:
    there = driver(2)
    for name in "ab":
        there.do(Submitted(JobSpec(id=name, submit_s=there.now_s, tenant="t"), PROGRAM))
        there.hello(name)
        there.resumed(name)
        there.progress(name, 10)
    commands = there.do(SettingsChanged(quotas={"t": 1}))
    assert [job for job, _, _ in told(commands, wire.Suspend)] == ["b"]
    there.parked("b", 11)
    assert (there.state("a"), there.state("b")) == (JobState.RUNNING, JobState.SUSPENDED)
    assert there.core.ledger.free == 1
    commands = there.do(SettingsChanged(quotas={"t": 2}))
    assert [job for job, _, _ in told(commands, wire.Resume)] == ["b"]
    there.resumed("b")
    there.do(SettingsChanged(quotas={"t": 1}))
    there.parked("b", 12)
    commands = there.do(SettingsChanged(quotas={}))
    assert [job for job, _, _ in told(commands, wire.Resume)] == ["b"]
    assert same(there.replayed(RoundRobin(quantum_s=QUANTUM_S)), there.core)


def test_who_waits_for_a_quota_keeps_the_place_when_it_grows() -> None:
    there = driver(3, quotas={"t": 1})
    for name in "abc":
        there.do(Submitted(JobSpec(id=name, submit_s=there.now_s, tenant="t"), PROGRAM))
        there.hello(name)
    commands = there.do(SettingsChanged(quotas={"t": 2}))
    assert [job for job, _, _ in told(commands, wire.Resume)] == ["b"]
    assert there.core.allocation.quotas.tenants["t"].line == ["a", "b", "c"]


def test_jobs_that_share_a_device_share_it_no_more_under_a_policy_that_packs_none() -> None:
    there = driver(policy=Shares())
    for name in "ab":
        there.submit(name)
        there.hello(name)
        there.resumed(name)
        there.progress(name, 10)
    commands = there.do(change("fifo"))
    assert [job for job, _, _ in told(commands, wire.Suspend)] == ["b"]
    there.parked("b", 11)
    assert there.core.jobs["a"].lease == (0,)


def test_a_guarantee_ends_with_the_policy_that_gave_it() -> None:
    there = driver(policy=make_policy("chronus", {"lease_s": "10", "best_effort_lease_s": "5"}))
    spec = JobSpec(id="a", submit_s=there.now_s, deadlines=((100.0, 1.0),), guaranteed=True, expected_s=5.0)
    there.do(Submitted(spec, PROGRAM))
    there.hello("a")
    assert there.core.jobs["a"].guaranteed
    assert [notice.what for notice in notices(there.do(change("rr")))] == ["guarantee_lost"]
    assert there.core.jobs["a"].guaranteed is False
    with pytest.raises(UsageError, match="--policy chronus"):
        there.do(Submitted(msgspec.structs.replace(spec, id="b"), PROGRAM))


def test_the_switch_share_is_told_to_policies_from_now_on() -> None:
    there = driver()
    there.do(SettingsChanged(switch_share=0.25))
    assert there.core.state.switch_costs.pays_after_s(1.0) == 4.0
