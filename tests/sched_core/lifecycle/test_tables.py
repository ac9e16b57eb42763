"""Every report in every joint state: what it is, and that nothing but news changes anything."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from gpuslice import wire
from gpuslice.errors import IllegalTransitionError
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.command import Stage
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.rank import RankPhase
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Exited, RankGone
from gpuslice.sched_core.lifecycle.reports import answer_to, is_news, is_news_of_end, report_of
from gpuslice.sched_core.lifecycle.tables import REPORTS, RULES, THERE, Answer, If, Report

from ..driver import PROGRAM, Driver, picture, put_into, refused, suspended

EPOCH, BOUNDARY, PID = 4, 6, 1


def messages(ranks: int) -> Iterator[wire.FromAgent]:
    """Every message, with every relation of its numbers to those of the rank that says it."""
    for epoch, boundary in product((0, EPOCH - 1, EPOCH, EPOCH + 1), (BOUNDARY - 1, BOUNDARY, BOUNDARY + 1)):
        yield wire.Progress(epoch=epoch, boundary=boundary, step=boundary)
        yield wire.Resumed(epoch=epoch, boundary=boundary, stages_s={})
        yield suspended(epoch, boundary)
        yield wire.Overshot(epoch=epoch, boundary=boundary)
        yield wire.Bye(epoch=epoch, boundary=boundary, step=boundary)
        yield refused(epoch, boundary, running=True)
        yield refused(epoch, boundary, running=False)
        yield wire.Profiled(epoch=epoch, tensors=1, nbytes=8, largest_bytes=8)
        yield wire.Withdrawn(epoch=epoch)
        for parked, pid, replaces in product((True, False), (PID, PID + 1, 9), (0, PID)):
            yield wire.Hello(
                version=1,
                job="a",
                rank=0,
                world_size=ranks,
                pid=pid,
                boundary=boundary,
                epoch=epoch,
                parked=parked,
                replaces=replaces,
            )


def joint_states() -> Iterator[Gang]:
    """A job of one rank, and one of two, in every state, with its first rank in every phase."""
    for state, phase, ranks, step, stop_at in product(JobState, RankPhase, (1, 2), (0, 6), (8, 2**62)):
        job = Gang(JobSpec(id="a", submit_s=0.0, devices=ranks), 0, PROGRAM)
        put_into(job, state)
        job.epoch = EPOCH
        job.command.go_on(Stage.STARTED)
        job.asked.stop_at = stop_at
        (first, *_) = job.ranks
        if phase is not RankPhase.ABSENT:
            first.phase, first.pid, first.step, first.boundary = phase, PID, step, BOUNDARY if step else 0
        if ranks == 1:
            beside = wire.Hello(version=1, job="a", rank=0, world_size=1, pid=9, replaces=PID)
            job.processes.beside = (beside,)
        yield job


def test_every_report_of_every_rank_is_news_known_stale_or_impossible() -> None:
    found = set[tuple[Report, RankPhase, Answer]]()
    for job in joint_states():
        rank = job.ranks[0]
        for message in messages(len(job.ranks)):
            report = report_of(job, rank, message)
            answer = answer_to(job, rank, report, message)
            found.add((report, rank.phase, answer))
            if job.state.ended:
                assert not is_news(job, 0, message)
            elif answer is Answer.IMPOSSIBLE:
                with pytest.raises(IllegalTransitionError):
                    is_news(job, 0, message)
            else:
                assert is_news(job, 0, message) == (answer is Answer.NEWS)
    # Each rule of the table decides something.
    named = {(report, phase, answer) for (report, phase), rules in RULES.items() for _, answer in rules[:-1]}
    ends = {(report, phase, answer) for report, phase, answer in named if "GONE" in report.name}
    assert named - ends <= found


def test_every_end_of_a_process_is_news_known_or_impossible() -> None:
    for job in joint_states():
        phase = job.ranks[0].phase
        for pid in (0, PID, 7):
            other = pid not in (0, job.ranks[0].pid)
            if other or phase in THERE:
                assert is_news_of_end(job, 0, pid, None)
            elif phase is RankPhase.ABSENT and job.state.ended:
                assert not is_news_of_end(job, 0, pid, None)
            else:
                with pytest.raises(IllegalTransitionError):
                    is_news_of_end(job, 0, pid, None)


def test_the_table_is_total_and_each_rule_can_be_reached() -> None:
    assert set(REPORTS) == set(Report)
    for rules in RULES.values():
        conditions = [condition for condition, _ in rules]
        assert conditions[-1] is If.ALWAYS
        assert len(set(conditions[:-1])) == len(conditions[:-1]), "a condition is asked twice"


def test_a_rank_without_a_process_says_nothing_but_hello() -> None:
    for report in Report:
        if "HELLO" in report.name or "GONE" in report.name:
            continue
        for phase in (RankPhase.ABSENT, RankPhase.GONE):
            assert RULES[report, phase] == ((If.ALWAYS, Answer.IMPOSSIBLE),)


def queued() -> Driver:
    driver = Driver()
    driver.submit("a")
    return driver


def greeted() -> Driver:
    driver = Driver()
    for job in "ba":
        driver.submit(job)
        driver.hello(job)
    return driver


def starting() -> Driver:
    driver = queued()
    driver.hello("a")
    return driver


def running() -> Driver:
    driver = starting()
    driver.resumed("a")
    driver.progress("a", 10)
    return driver


def suspending() -> Driver:
    driver = Driver()
    driver.running_pair()
    driver.wake()
    return driver


def parked() -> Driver:
    driver = suspending()
    driver.parked("a", 11)
    return driver


def resuming() -> Driver:
    driver = parked()
    driver.resumed("b")
    driver.progress("b", 5)
    driver.wake()
    driver.parked("b", 6)
    return driver


def leaving() -> Driver:
    driver = running()
    driver.say("a", wire.Bye(epoch=driver.core.jobs["a"].epoch, boundary=11, step=11))
    return driver


def idle() -> Driver:
    driver = leaving()
    driver.do(RankGone("a", 0, pid=1))
    return driver


def ended() -> Driver:
    driver = idle()
    driver.do(Exited("a", 0))
    return driver


WAYS = (queued, greeted, starting, running, suspending, parked, resuming, leaving, idle, ended)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_is_not_news_changes_nothing_and_news_never_fails(way: object) -> None:
    assert callable(way)
    driver = way()
    job = driver.core.jobs["a"]
    epoch, boundary = job.epoch, job.ranks[0].boundary
    for template in messages(1):
        changes = {"epoch": max(0, template.epoch - EPOCH + epoch)}
        if hasattr(template, "boundary"):
            changes["boundary"] = max(0, template.boundary - BOUNDARY + boundary)
        message = type(template)(
            **{name: getattr(template, name) for name in template.__struct_fields__} | changes
        )
        fresh = way()
        before = picture(fresh.core)
        try:
            news = is_news(fresh.core.jobs["a"], 0, message)
        except IllegalTransitionError:
            with pytest.raises(IllegalTransitionError):
                fresh.say("a", message)
            assert picture(fresh.core) == before
            continue
        fresh.say("a", message)  # checks all invariants
        if not news:
            assert picture(fresh.core) == before
