"""Devices that others use: no job begins there, and jobs leave them at a boundary if they must."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from gpuslice.errors import UsageError
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import DevicesUsed, Unpaused
from gpuslice.verbs import DeviceUser
from gpuslice.wire import Resume, Suspend

from ..driver import notices, told
from .test_device_requests import EPOCH_S, Box

COLLEAGUE = DeviceUser(
    pid=4711, user="u1003", command="python", nbytes=21 << 30, since_unix_s=EPOCH_S - 300.0
)


def used(box: Box, *devices: int, left: tuple[int, ...] = (), node: str = "") -> Any:
    """Tell ``box`` that a colleague uses ``devices`` and no others, and that jobs leave those of ``left``."""
    names = [str(device) for device in box.core.devices]
    users = {names[device]: (COLLEAGUE,) for device in devices}
    return box.do(DevicesUsed(node, box.unix_s, users, tuple(names[device] for device in left)))


def test_no_job_begins_on_a_device_that_others_use_and_it_comes_back_by_itself() -> None:
    box = Box(1)
    commands = used(box, 0)
    (notice,) = notices(commands)
    assert (notice.what, notice.details["devices"]) == ("device_used", "null:0")
    assert str(notice.details["by"]).startswith("used by u1003, pid 4711 python, 21.00 GiB, since ")
    box.running("a")
    assert not box.lease("a")
    commands = used(box)
    assert "device_free" in [notice.what for notice in notices(commands)]
    box.greets("a")
    assert box.lease("a") == (0,)


def test_a_job_that_is_there_goes_on_beside_others_unless_it_must_leave() -> None:
    box = Box(1)
    box.running("a")
    assert not told(used(box, 0), Suspend)
    assert [job for job, _, _ in told(used(box, 0, left=(0,)), Suspend)] == ["a"]
    box.parks("a")
    assert box.state("a") is JobState.SUSPENDED
    assert [job for job, _, _ in told(used(box), Resume)] == ["a"]


def test_a_job_goes_to_a_free_device_when_others_take_its_own() -> None:
    box = Box(2)
    box.running("a")
    used(box, 0, left=(0,))
    commands = box.parks("a")
    assert [(job, message.device) for job, _, message in told(commands, Resume)] == [("a", "null:1")]


def test_a_pause_and_others_do_not_open_what_the_other_closes() -> None:
    box = Box(1)
    box.pause(0)
    used(box, 0, left=(0,))
    used(box)
    box.running("a")
    assert not box.lease("a")
    used(box, 0, left=(0,))
    box.do(Unpaused(("null:0",)))
    assert not box.lease("a")
    used(box)
    box.greets("a")
    assert box.lease("a") == (0,)


def test_what_is_said_of_a_node_is_about_its_own_devices() -> None:
    box = Box(2, nodes=("", "b"))
    used(box, 2, node="b", left=(2,))
    used(box)
    assert list(box.core.state.closed.users) == [2]
    with pytest.raises(UsageError, match="no device 'b/null:0'"):
        used(box, 2)
    assert list(box.core.state.closed.users) == [2]


def test_status_says_who_uses_a_device() -> None:
    from gpuslice.sched_core.core.device_verbs import device_info

    box = Box(1)
    used(box, 0)
    assert device_info(box.core.state, 0).used_by == (COLLEAGUE,)


def test_policies_know_of_devices_that_only_jobs_may_have_that_are_there() -> None:
    """A policy that does not look at ``Job.closed`` leaves none of these idle."""
    box = Box(2)
    used(box, 0)
    assert box.core.state.closed.restricted == {0}
    used(box, 0, left=(0,))
    assert not box.core.state.closed.restricted


def test_nobody_knows_when_a_device_that_was_removed_comes_back() -> None:
    box = Box(2)
    box.running("a")
    box.core.state.closed.remove([1])
    assert box.core.state.closed.opens_unix_s(box.core.jobs["a"], 1) == inf
