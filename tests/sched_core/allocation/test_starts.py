"""Jobs that may not start yet: held, until a moment, and after other jobs; and all of it with all else."""

from __future__ import annotations

from itertools import product

import pytest

from gpuslice.errors import IllegalTransitionError, UsageError
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    ArraySubmitted,
    Cancelled,
    Clocked,
    Command,
    Exited,
    Held,
    Launch,
    Limited,
    Moved,
    Point,
    RankGone,
    Released,
    Requeued,
    Submitted,
    WakeAt,
)
from gpuslice.sched_core.live.blockers import Blockers
from gpuslice.sched_core.policies.rr import RoundRobin

from ..driver import PROGRAM, QUANTUM_S, Driver, picture

NOON = 1_800_000_000.0


class Day(Driver):
    """A driver whose core knows the time of day: it is noon at 0.25 s."""

    def __init__(self, device_count: int = 1, **limits: object) -> None:
        super().__init__(device_count, **limits)  # type: ignore[arg-type]
        self.do(Clocked(NOON))

    def ask(self, job: str, **fields: object) -> list[Command]:
        spec = JobSpec(id=job, submit_s=self.now_s, **fields)  # type: ignore[arg-type]
        return self.do(Submitted(spec, PROGRAM))

    def ask_many(self, array: str, count: int, **fields: object) -> list[Command]:
        spec = JobSpec(id=array, submit_s=self.now_s, **fields)  # type: ignore[arg-type]
        points = tuple(Point(f"{array}-{number}", PROGRAM.argv) for number in range(count))
        return self.do(ArraySubmitted(spec, PROGRAM, points))

    def job(self, name: str) -> Gang:
        return self.core.jobs[name]

    def starts(self, job: str) -> bool:
        """Whether the command of a job was started."""
        return self.job(job).command.launched

    def run(self, job: str) -> None:
        """Have a job that was started train until boundary 10."""
        self.hello(job)
        self.resumed(job)
        self.progress(job, 10)

    def end(self, job: str, code: int = 0, said: str = "") -> list[Command]:
        """Have a job's process and command end."""
        for rank in self.job(job).there():
            self.do(RankGone(job, rank.number, unseen=True))
        return self.do(Exited(job, code, said))

    def why(self, job: str) -> str | None:
        return Blockers(self.core, self.now_s).why(self.job(job))


def wakes(commands: list[Command]) -> list[float | None]:
    return [command.when_s for command in commands if isinstance(command, WakeAt)]


def test_a_job_that_is_submitted_held_starts_when_it_is_resumed() -> None:
    day = Day()
    assert not any(isinstance(command, Launch) for command in day.ask("a", hold=True))
    assert day.why("a") == "held by its owner (`gpuslice resume a`)"
    day.now_s += 5.0
    assert (day.job("a").held_at(day.now_s), day.job("a").without_devices_at(day.now_s)) == (5.0, 0.0)
    assert any(isinstance(command, Launch) for command in day.do(Released("a")))
    day.run("a")
    assert day.state("a") is JobState.RUNNING


def test_a_job_begins_at_its_moment_and_counts_as_waiting_only_then() -> None:
    day = Day()
    commands = day.ask("a", begin_unix_s=NOON + 3600.0)
    assert wakes(commands) == [3600.25]
    assert not day.starts("a")
    told = day.why("a")
    assert str(told).startswith("begins at ")
    assert str(told).endswith(", in 60 min (--begin)")
    day.wake(3599.0)
    assert not day.starts("a")
    day.wake(1.0)
    assert day.starts("a")
    job = day.job("a")
    assert (job.held_at(day.now_s), job.without_devices_at(day.now_s)) == (3600.0, 0.0)
    day.run("a")
    assert day.state("a") is JobState.RUNNING


def test_a_moment_that_has_passed_is_no_condition() -> None:
    day = Day()
    day.ask("a", begin_unix_s=NOON - 1.0)
    assert day.starts("a")


def test_a_machine_that_was_off_changes_no_moment() -> None:
    day = Day()
    day.ask("a", begin_unix_s=NOON + 3600.0)
    day.now_s += 10.0  # the core's clock stood still while the machine was off
    commands = day.do(Clocked(NOON + 3000.0))
    assert wakes(commands) == [pytest.approx(610.25)]
    core = day.replayed(RoundRobin(quantum_s=QUANTUM_S))
    assert picture(core) == picture(day.core)
    day.wake(599.0)
    assert not day.starts("a")
    day.wake(1.5)
    assert day.starts("a")


def test_without_the_time_of_day_no_job_can_wait_for_it() -> None:
    driver = Driver()
    with pytest.raises(UsageError, match="time of day"):
        driver.do(Submitted(JobSpec(id="a", submit_s=0.25, begin_unix_s=NOON), PROGRAM))


@pytest.mark.parametrize(
    ("how", "code", "starts"),
    [
        *(("", 0, True), (":ok", 0, True), (":ok", 1, False), (":failed", 1, True), (":failed", 0, False)),
        *((":any", 0, True), (":any", 1, True)),
    ],
)
def test_a_job_follows_another_one(how: str, code: int, starts: bool) -> None:
    day = Day(2)
    day.ask("a")
    day.ask("b", after=(f"a{how}",))
    day.run("a")
    assert not day.starts("b")
    day.end("a", code, "ValueError: no" if code else "")
    day.ask("late", after=(f"a{how}",))
    for job in ("b", "late"):
        assert day.starts(job) is starts
        assert (day.state(job) is JobState.CANCELLED) is not starts
    if not starts:
        what = "failed" if how == ":failed" else "succeeded"
        assert day.job("b").verdict.reason.startswith(f"it was to start once a has {what} (--after), which ")


def test_why_names_the_jobs_that_it_follows() -> None:
    day = Day(2)
    day.ask("a")
    day.ask("b")
    day.ask("c", after=("a", "b:any"))
    assert day.why("c") == "waits until a has succeeded and b has ended (--after)"
    day.run("a")
    day.end("a")
    assert day.why("c") == "waits until b has ended (--after)"
    day.do(Cancelled("b", "no"))
    assert day.starts("c") is False, "a process of b is left"
    day.do(Exited("b", -15))
    assert day.starts("c")


def test_a_chain_that_can_never_come_true_ends_as_a_whole() -> None:
    day = Day()
    day.ask("a", hold=True)
    day.ask("b", after=("a",))
    day.ask("c", after=("b",), begin_unix_s=NOON + 60.0)
    day.ask("d", after=("c:any",))
    day.do(Cancelled("a", "cancelled by its owner"))
    assert [day.state(job) for job in "abc"] == [JobState.CANCELLED] * 3
    assert day.job("c").verdict.reason.endswith("which was cancelled: " + day.job("b").verdict.reason)
    assert day.starts("d")


def test_a_restarted_job_is_followed_only_at_its_end() -> None:
    day = Day()
    day.ask("a", max_restarts=1)
    day.ask("b", after=("a:failed",))
    day.run("a")
    day.end("a", -9)
    assert not day.starts("b")
    day.wake(5.0)
    day.run("a")
    day.end("a", -9)
    assert (day.state("a"), day.starts("b")) == (JobState.FAILED, True)


@pytest.mark.parametrize("fields", [{"after": ("a",)}, {"begin_unix_s": NOON + 60.0}])
def test_a_job_that_is_requeued_waits_for_nothing_more(fields: dict[str, object]) -> None:
    day = Day(2)
    day.ask("a", hold=True)
    day.ask("b", **fields)
    day.do(Cancelled("a", "no"))
    if day.state("b") is not JobState.CANCELLED:
        day.do(Cancelled("b", "no"))
    day.wake(120.0)
    day.do(Requeued("b"))
    assert day.starts("b")


@pytest.mark.parametrize(
    ("how", "codes", "starts"),
    [
        *(("", (0, 0, 0), True), (":ok", (0, 0, 1), False), (":failed", (1, 0, 0), True)),
        *((":failed", (0, 0, 0), False), (":any", (0, 1, 0), True)),
    ],
)
def test_a_job_follows_an_array_once_all_of_its_jobs_have_ended(
    how: str, codes: tuple[int, ...], starts: bool
) -> None:
    day = Day(3)
    day.ask_many("s", 3)
    day.ask("b", after=(f"s{how}",))
    for number, code in enumerate(codes):
        assert not day.starts("b")
        day.run(f"s-{number}")
        day.end(f"s-{number}", code, "ValueError: no" if code else "")
    day.ask_many("late", 2, after=(f"s{how}",))
    for job in ("b", "late-0", "late-1"):
        assert day.starts(job) is starts
        assert (day.state(job) is JobState.CANCELLED) is not starts
    assert picture(day.replayed(RoundRobin(quantum_s=QUANTUM_S))) == picture(day.core)


def test_who_follows_an_array_is_told_which_of_its_jobs_ended_otherwise() -> None:
    day = Day(3)
    day.ask_many("s", 3, hold=True)
    day.ask("ok", after=("s",))
    day.ask("failed", after=("s:failed",))
    day.ask("any", after=("s:any",))
    assert day.why("ok") == "waits until all jobs of s have succeeded (--after)"
    assert day.why("failed") == "waits until all jobs of s have ended and one has failed (--after)"
    day.do(Cancelled("s-1", "enough"))
    assert day.job("ok").verdict.reason == (
        "it was to start once all jobs of s have succeeded (--after), and s-1 was cancelled: enough"
    )
    assert not day.state("failed").ended, "another one may fail"
    day.do(Requeued("s-1"))
    for job in ("s-0", "s-2"):
        day.do(Cancelled(job, "enough"))
    assert not day.starts("any"), "s-1 was started again"
    day.run("s-1")
    day.end("s-1")
    assert day.starts("any")
    assert day.job("failed").verdict.reason.endswith("(--after), and s-0 was cancelled: enough")


def test_a_job_cannot_follow_one_that_does_not_exist() -> None:
    day = Day()
    with pytest.raises(UsageError, match="after job x, and there is no such job or array"):
        day.ask("a", after=("x:any",))
    assert "a" not in day.core.jobs


def test_a_job_with_conditions_is_no_held_job() -> None:
    day = Day()
    day.ask("a", begin_unix_s=NOON + 60.0)
    with pytest.raises(IllegalTransitionError):
        day.do(Released("a"))


#: What else can be said of a job that may not start yet, each by itself and with each condition.
_OTHERS = ("nothing", "trial", "quota", "no prestart", "moved", "suspended", "gang", "deadline")


@pytest.mark.parametrize(
    ("hold", "begin", "after"), [one for one in product([False, True], repeat=3) if any(one)]
)
@pytest.mark.parametrize("other", _OTHERS)
def test_it_starts_once_all_conditions_are_met_and_not_before(
    other: str, hold: bool, begin: bool, after: bool
) -> None:
    day = Day(2, quotas={"t": 2})
    if other == "no prestart":
        day.do(Limited(0))
    day.ask("a", tenant="t", devices=1)
    day.run("a")
    ranks = 2 if other in ("gang", "quota") else 1
    fields: dict[str, object] = {"devices": ranks, "tenant": "t" if other == "quota" else ""}
    fields |= {"trial_batches": 2} if other == "trial" else {}
    fields |= {"deadlines": ((5.0, 1.0),)} if other == "deadline" else {}
    conditions = [name for name, given in (("hold", hold), ("begin", begin), ("after", after)) if given]
    fields |= {"hold": hold, "begin_unix_s": NOON + 30.0 if begin else 0.0, "after": ("a",) if after else ()}
    day.ask("b", **fields)
    if other == "moved":
        day.do(Moved("b", ("null:1",)))
    if other == "suspended" and not hold:
        day.do(Held("b"))
        conditions.append("hold")
    day.ask("c", tenant="t", devices=1)
    day.run("c") if other != "quota" or day.starts("c") else None
    for condition in conditions:
        assert not day.starts("b"), f"before {condition}"
        assert not day.job("b").shown
        assert day.why("b")
        if condition == "hold":
            day.do(Released("b"))
        elif condition == "begin":
            day.wake(31.0)
        else:
            day.end("a")
    for job in "ac":
        if not day.state(job).ended:
            day.end(job)
    assert day.starts("b")
    day.hello("b")
    for rank in range(ranks):
        day.resumed("b", rank)
    assert day.state("b") is JobState.RUNNING
    assert day.job("b").lease == ((1,) if other == "moved" else tuple(range(ranks))), "its devices are there"
