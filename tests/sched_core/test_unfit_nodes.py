"""A node that cannot start a job's command: the job is tried on others, and nobody is held up by that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gpuslice.errors import UsageError
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Command,
    Event,
    Exited,
    Limited,
    Moved,
    NodeFound,
    NodeLost,
    Notice,
)
from gpuslice.sched_core.policies.registry import POLICIES, make_policy
from gpuslice.sched_core.policy import Policy

from .driver import Driver
from .relocating import NODES, Quiet, begun, launches
from .test_lost_nodes import WRAPPED, World

NO_COMMAND = "gpuslice: node b cannot start it: there is no command train"


class Lacking(World):
    """A world in which some nodes cannot start some jobs."""

    def __init__(self, policy: Policy, lacking: Mapping[str, tuple[str, ...]], size: int = 2) -> None:
        super().__init__(policy, size)
        self.lacking = lacking
        self.notices: list[Notice] = []

    def do(self, event: Event) -> list[Command]:
        commands = super().do(event)
        self.notices += [command for command in commands if isinstance(command, Notice)]
        return commands

    def _live(self, job: Gang) -> None:
        nodes = self.core.state.nodes.named(job.nodes)
        bad = [node for node in dict.fromkeys(nodes) if node in self.lacking.get(job.id, ())]
        if not bad or not job.command.runs or job.there():
            super()._live(job)
        elif len(set(nodes)) == 1:
            self.do(Exited(job.id, 127, f"gpuslice: cannot start train: No such file on {bad[0]}"))
        else:
            for node in (*bad, *(set(nodes) - set(bad))):
                self.do(Exited(job.id, 127 if node in bad else -9, "no such file", node))

    def said(self, what: str) -> list[Mapping[str, object]]:
        return [notice.details for notice in self.notices if notice.what == what]


@pytest.mark.filterwarnings("ignore:HiGHS")
@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in POLICIES), *WRAPPED], ids=lambda value: str(value) or "-"
)
def test_under_every_policy_jobs_end_well_where_their_command_can_be_started(
    name: str, options: Mapping[str, Any]
) -> None:
    own = {"packing": False} if name == "gandiva" else {}
    lacking = {f"j{number}": (("b",), ("", "b"), ("c",))[number % 3] for number in (0, 2, 4)}
    here = Lacking(make_policy(name, {**own, **options}), lacking)
    here.do(Limited(1))
    for number in range(6):
        here.start(number, 1 + number % 2)
    assert set(here.finish()) == {JobState.SUCCEEDED}
    assert here.used == {"", "b", "c"}
    assert all(job.failures == 0 for job in here.core.jobs.values())
    assert len(here.said("not_started")) <= 6  # each node is tried once
    assert not here.said("failed")


def on_b() -> Driver:
    """Job a trains on the scheduler's node; job z was started on node b and has not greeted."""
    policy = Quiet()
    driver = Driver(1, policy, NODES)
    begun(policy, driver, "a")
    assert launches(driver.submit("z"))[0].nodes == ("b",)
    return driver


def test_the_job_is_started_elsewhere_at_once_and_the_node_is_named() -> None:
    driver = on_b()
    commands = driver.do(Exited("z", 127, NO_COMMAND))
    (told,) = [command for command in commands if isinstance(command, Notice)]
    reason = "node b cannot start it: there is no command train"
    assert (told.what, told.job) == ("not_started", "z")
    assert told.details == {"node": "b", "reason": reason, "attempt": 1}
    (launch,) = launches(commands)
    assert (launch.nodes, launch.attempt) == (("",), 1)
    job = driver.core.jobs["z"]
    assert (job.failures, job.state, job.within) == (0, JobState.QUEUED, (0,))


def test_a_command_that_no_node_can_start_is_its_users_fault() -> None:
    driver = on_b()
    driver.do(Exited("z", 127, NO_COMMAND))
    driver.do(Exited("z", 126))
    job = driver.core.jobs["z"]
    assert (job.state, job.verdict.failure) == (JobState.FAILED, "user")
    assert job.verdict.reason == (
        "no node can start it: b: node b cannot start it: there is no command train; "
        "here: its command cannot be executed"
    )


def test_a_command_that_has_begun_fails_as_any_other() -> None:
    driver = on_b()
    driver.hello("z")
    driver.do(Exited("z", 127))
    job = driver.core.jobs["z"]
    assert not job.command.not_for


def test_on_one_node_nothing_else_is_tried() -> None:
    driver = Driver(2)
    driver.submit("z")
    driver.do(Exited("z", 127, "gpuslice: cannot start train: No such file or directory"))
    assert driver.state("z") is JobState.FAILED


def test_its_owner_cannot_move_it_there_before_the_node_has_been_away() -> None:
    driver = on_b()
    driver.do(Exited("z", 127, NO_COMMAND))
    with pytest.raises(UsageError, match=r"node b cannot start job z: .* no command train"):
        driver.do(Moved("z", ("b/null:0",)))
    driver.do(NodeLost("b"))
    driver.do(NodeFound("b"))
    driver.do(Moved("z", ("b/null:0",)))
    assert driver.core.jobs["z"].within == ()


def test_a_gang_that_needs_several_nodes_is_tried_on_others() -> None:
    here = Lacking(make_policy("fifo", {}), {"j0": ("b",)})
    here.start(0, 4)
    assert here.finish() == [JobState.SUCCEEDED]


def test_a_gang_that_too_few_nodes_can_start_fails_by_name() -> None:
    here = Lacking(make_policy("fifo", {}), {"j0": ("b", "c")})
    here.start(0, 4)
    assert here.finish() == [JobState.FAILED]
    assert "too few nodes can start it" in here.core.jobs["j0"].verdict.reason
