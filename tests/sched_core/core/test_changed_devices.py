"""Devices that come and go while the scheduler runs."""

from __future__ import annotations

import msgspec
import pytest

from gpuslice import verbs, wire
from gpuslice.errors import UsageError
from gpuslice.sched_core.core.device_verbs import device_info, event_of
from gpuslice.sched_core.core.owner_requests import check_submission
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Held, Moved, Paused, SettingsChanged
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policies.rr import RoundRobin

from ..driver import QUANTUM_S, Driver, picture, suspended, told


def driver(count: int) -> Driver:
    return Driver(count, make_policy=make_policy)


def become(*numbers: int) -> SettingsChanged:
    options = {"quantum_s": str(QUANTUM_S)}
    return SettingsChanged("rr", options, devices=tuple(f"null:{number}" for number in numbers))


def run(there: Driver, *jobs: str) -> None:
    for job in jobs:
        there.submit(job)
        there.hello(job)
        there.resumed(job)
        there.progress(job, 10)


def present(there: Driver) -> list[str]:
    state = there.core.state
    return [device_info(state, device).name for device in state.present]


def test_a_new_device_is_used_at_once() -> None:
    there = driver(1)
    there.running_pair()
    commands = there.do(become(0, 3))
    assert told(commands, wire.Resume) == [("b", 0, wire.Resume(epoch=1, device="null:3"))]
    there.resumed("b")
    assert (present(there), there.core.ledger.free) == (["null:0", "null:3"], 0)
    there.submit("c", 2)
    there.hello("c")
    assert same_as_replayed(there, 1)


def same_as_replayed(there: Driver, count: int) -> bool:
    other = Driver(count, RoundRobin(quantum_s=QUANTUM_S), make_policy=make_policy)
    for event, now_s in there.journal:
        other.core.handle(event, now_s)
    return picture(other.core) == picture(there.core)


def test_what_is_on_a_removed_device_parks_and_then_the_device_is_gone() -> None:
    there = driver(2)
    run(there, "a", "b")
    commands = there.do(become(0))
    assert [job for job, _, _ in told(commands, wire.Suspend)] == ["b"]
    assert present(there) == ["null:0", "null:1"]
    assert device_info(there.core.state, 1).removed
    there.parked("b", 11)
    assert present(there) == ["null:0"]
    assert (there.state("b"), there.core.ledger.free) == (JobState.SUSPENDED, 0)
    there.do(become(0, 1))
    assert there.core.jobs["b"].lease == (1,), "it has come back under its old number"
    there.resumed("b")
    assert not device_info(there.core.state, 1).removed
    assert same_as_replayed(there, 2)


def test_a_device_that_is_gone_is_no_device_any_more() -> None:
    there = driver(2)
    run(there, "a")
    there.do(Paused(("null:1",), 1e9))
    there.do(become(0))
    with pytest.raises(UsageError, match="no device 'null:1'"):
        there.do(Moved("a", ("null:1",)))
    with pytest.raises(UsageError, match="no device 'null:1'"):
        there.do(Paused(("null:1",), 1e9))
    with pytest.raises(UsageError, match="no device and no node 'null:1'"):
        event_of(there.core.state, verbs.Pause(devices=("null:1",)), 1e9)
    with pytest.raises(UsageError, match="2 devices of 1"):
        check_submission(there.core.state, there.core.allocation, JobSpec(id="g", submit_s=0.0, devices=2))
    there.do(become(1))
    there.parked("a", 11)
    assert (there.core.jobs["a"].lease, present(there)) == ((1,), ["null:1"]), "its pause has ended"


def test_no_job_is_left_without_the_devices_that_it_needs() -> None:
    there = driver(3)
    there.submit("g", 2)
    there.hello("g")
    with pytest.raises(UsageError, match="job g could never run without null:0, null:1"):
        there.do(become(2))
    assert present(there) == ["null:0", "null:1", "null:2"]
    there.do(become(2, 5))
    assert there.core.jobs["g"].wanted == (2, 3)


def test_a_job_that_can_go_on_only_there_keeps_its_device() -> None:
    there = driver(2)
    run(there, "a", "b")
    there.do(Held("b"))
    there.say("b", msgspec.structs.replace(suspended(1, 11), bound="a foreign pointer"))
    with pytest.raises(UsageError, match="job b could never run without null:1"):
        there.do(become(0))
    there.do(become(1))
    assert present(there) == ["null:0", "null:1"], "a is still there"


@pytest.mark.parametrize(("names", "said"), [((), "no device"), ((0, 0), "named twice")])
def test_devices_are_named_once(names: tuple[int, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        driver(1).do(become(*names))


def test_devices_of_several_nodes_stay() -> None:
    there = Driver(1, nodes=("a", "b"), make_policy=make_policy)
    with pytest.raises(UsageError, match="other nodes"):
        there.do(become(0))
