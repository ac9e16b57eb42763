"""Why jobs wait: every case has its sentence, and over random runs of the core the sentence is true."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import pytest

from gpuslice import wire
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.jobs.accounts import Activity
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Limited
from gpuslice.sched_core.live.blockers import Blockers
from gpuslice.sched_core.live.wait_facts import Blocked, Facts, Lost, Memory, Quota, Refusal, Use
from gpuslice.sched_core.live.why import CASES, listed, span, why
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policy import Plan, Start, Suspend, View

from ..driver import Driver, Scripted, refused
from ..test_everybody_ends import STEPS, World
from ..world.scenario import Scenario, draw_scenario
from ..world.schedulers import todays_core
from ..world.world import World as Live

WAITS, ON = JobState.SUSPENDED, ("cuda:0",)
LOST = (Lost("node b", 12.0),)
TAKEN = (Use("cuda:0", ("a",)), Use("cuda:1", ("b",)))
GIB = 1 << 30
AT_S = 1_800_000_000.0


def facts(state: JobState = WAITS, **values: object) -> Facts:
    """A job that would train on a free device, but for ``values``."""
    usual: dict[str, object] = {"policy": "rr", "size": 2, "free": ("cuda:0", "cuda:1"), "for_s": 3.0}
    return Facts(id="j", state=state, **(usual | values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "found", "sentence"),
    [
        ("ended", facts(JobState.FAILED), "its processes are ending (3.0 s so far)"),
        ("ended", facts(JobState.FAILED, exists=False), None),
        (
            "node_lost",
            facts(lost_processes=LOST),
            "node b has not answered for 12 s; its processes are there",
        ),
        (
            "node_lost",
            facts(awaited=LOST, waits_s=540.0),
            "its processes are on node b, which has been silent for 12 s; waits for 9 min more"
            " (--wait-for-node)",
        ),
        (
            "node_lost",
            facts(awaited=LOST, waits_s=540.0, copy=Lost("c", 41.0)),
            "its processes are on node b, which has been silent for 12 s; waits for 9 min more"
            " (--wait-for-node); its copy on c is 41 s old",
        ),
        (
            "node_lost",
            facts(awaited=LOST, launched=False, exists=False, waits_s=-1.0),
            "its state is on node b, which has been silent for 12 s; goes on without it soon"
            " (--wait-for-node)",
        ),
        (
            "relaunching",
            facts(JobState.RELAUNCHING, wanted=("cuda:0", "cuda:1")),
            "its processes are ending, to be started for 2 devices (3.0 s so far)",
        ),
        (
            "relocating",
            facts(relocating=True, on="node b", wanted=ON),
            "its processes on node b are ending, to be started at cuda:0",
        ),
        (
            "retries",
            facts(JobState.QUEUED, launched=False, retry_s=4.0, reason="MemoryError"),
            "it is started again in 4.0 s; it failed: MemoryError",
        ),
        (
            "begin",
            facts(JobState.QUEUED, launched=False, begin_unix_s=AT_S, begins_s=3600.0),
            f"begins at {time.strftime('%H:%M', time.localtime(AT_S))}, in 60 min (--begin)",
        ),
        (
            "begin",
            facts(JobState.QUEUED, launched=False, begin_unix_s=AT_S, begins_s=90000.0),
            f"begins at {time.strftime('%Y-%m-%d %H:%M', time.localtime(AT_S))}, in 25.0 h (--begin)",
        ),
        (
            "after",
            facts(JobState.QUEUED, launched=False, after=("a has succeeded", "b has failed", "c has ended")),
            "waits until a has succeeded, b has failed and c has ended (--after)",
        ),
        ("between", facts(idle=True), "between two trainings: no process of it trains (3.0 s so far)"),
        (
            "between",
            facts(JobState.RUNNING, idle=True, lease=ON, trains=True),
            "between two trainings: no process of it trains and keeps cuda:0 (3.0 s so far)",
        ),
        ("coming", facts(JobState.STARTING, lease=ON), "its process goes to cuda:0 (3.0 s so far)"),
        ("coming", facts(JobState.RESUMING, lease=ON), "its state comes back to cuda:0 (3.0 s so far)"),
        (
            "coming",
            facts(JobState.RESUMING, lease=ON, late=1),
            "it did not come to cuda:0 in time (3.0 s so far)",
        ),
        (
            "coming",
            facts(JobState.RESUMING, lease=ON, resume_refused=Refusal("no room", 1.0)),
            "its resume on cuda:0 was refused: no room; tried again in 1.0 s",
        ),
        ("leaving", facts(JobState.SUSPENDING, lease=ON), "it stops at its next boundary (3.0 s so far)"),
        (
            "leaving",
            facts(JobState.SUSPENDING, lease=ON, held=True),
            "its owner holds it: it stops at its next boundary (3.0 s so far)",
        ),
        (
            "leaving",
            facts(JobState.SUSPENDING, lease=ON, finishing=True, stuck="at t.py:3, in f"),
            "all its steps are made: it is to stop; no boundary at t.py:3, in f (3.0 s so far)",
        ),
        (
            "stays",
            facts(JobState.RUNNING, suspend_refused=Refusal("8-bit state of a subclass", 4.0)),
            "its suspend was refused: 8-bit state of a subclass; tried again in 4.0 s",
        ),
        ("stuck", facts(JobState.RUNNING, stuck="at t.py:3, in f"), "no boundary at t.py:3, in f"),
        (
            "unleased",
            facts(JobState.RUNNING, unleased="4.00 MiB on cuda:1"),
            "4.00 MiB on cuda:1 without a lease: it cannot be suspended",
        ),
        (
            "late",
            facts(JobState.RUNNING, late=2, lease=ON),
            "it did not do in time what it was told, 2 times in a row; it keeps cuda:0",
        ),
        ("sets_up", facts(JobState.RUNNING, lease=ON), "it sets up on cuda:0: no step yet (3.0 s so far)"),
        ("sets_up", facts(JobState.RUNNING, lease=ON, trains=True), None),
        (
            "leaving",
            facts(JobState.SUSPENDING, lease=ON, closed=("cuda:0 is paused until 14:00",)),
            "cuda:0 is paused until 14:00: it stops at its next boundary (3.0 s so far)",
        ),
        (
            "shut_out",
            facts(shut_out=True, closed=("cuda:0 is paused until 14:00", "cuda:1 is drained")),
            "waits for 1 device: cuda:0 is paused until 14:00 and cuda:1 is drained",
        ),
        ("held", facts(held=True), "held by its owner (`gpuslice resume j`)"),
        ("kept", facts(kept=True, held=True), "kept for the next `gpuslice up`"),
        (
            "kept",
            facts(kept=True, relocating=True),
            "kept for the next `gpuslice up`: its processes are ending",
        ),
        (
            "quota",
            facts(quota=Quota("array", "sweep", 2, 2, ("a", "b"), "c", 1)),
            "array sweep has 2 of 2 jobs at once, for a and b",
        ),
        (
            "quota",
            facts(quota=Quota("first", "sweep", 1, 1, ("sweep-0",), "sweep-1", 1)),
            "array sweep starts with one job, to learn what memory its jobs need (--memory): sweep-0",
        ),
        (
            "quota",
            facts(quota=Quota("tenant", "lab", 2, 2, ("a",), "j", 1)),
            "tenant lab has 2 of 2 devices, for a",
        ),
        (
            "quota",
            facts(quota=Quota("tenant", "lab", 2, 1, ("a",), "j", 2)),
            "tenant lab has 1 of 2 devices, for a; it needs 2",
        ),
        (
            "quota",
            facts(quota=Quota("tenant", "lab", 2, 1, ("a",), "b", 1)),
            "tenant lab has 1 of 2 devices, for a; b is before it",
        ),
        (
            "stranded",
            facts(stranded=True, absent=(0,), state_from="node b"),
            "its state cannot be brought from node b now (3.0 s so far)",
        ),
        ("starting", facts(JobState.QUEUED, absent=(0,)), "its process is starting (3.0 s so far)"),
        (
            "starting",
            facts(absent=(0,), on="node b", state_from="node c"),
            "its process is starting on node b, its state comes from node c (3.0 s so far)",
        ),
        (
            "starting",
            facts(absent=(0,), on="node b", state_from="node c", state_bytes=204_000_000),
            "its process is starting on node b, its state (194.55 MiB) comes from node c (3.0 s so far)",
        ),
        (
            "starting",
            facts(absent=(0,), on="node b", state_from="c", state_bytes=1 << 30, arrived_bytes=700 << 20),
            "its process is starting on node b, its state (1.00 GiB, 68 %) comes from c (3.0 s so far)",
        ),
        ("starting", facts(absent=(0, 1), ranks=2), "its 2 processes are starting (3.0 s so far)"),
        ("starting", facts(absent=(2,), ranks=4), "rank 2 of 4 did not come yet (3.0 s so far)"),
        ("ending", facts(ending=True), "its training has ended"),
        ("lent", facts(lent_to=("b",)), "its devices are lent to b for a trial"),
        (
            "blocked",
            facts(wanted=ON, blocked=Blocked("cuda:0", "a", "it stops at its next boundary")),
            "waits for cuda:0, which a still uses: it stops at its next boundary",
        ),
        ("blocked", facts(wanted=ON), "its process goes to cuda:0"),
        ("trial", facts(trial_waits=True, tried=TAKEN[:1]), "waits for its trial: a is tried on cuda:0"),
        ("trial", facts(trial_waits=True), "waits for 1 device to be tried on; none can be borrowed"),
        (
            "policy_fails",
            facts(policy_error="KeyError: 'x'", policy_again_s=4.0),
            "policy rr failed and is asked again in 4.0 s: KeyError: 'x'",
        ),
        ("bound", facts(bound_to=TAKEN[1:]), "its state can be only on cuda:1, which b has"),
        (
            "too_few",
            facts(demand=3, lost=LOST),
            "needs 3 devices and there are 2: node b has not answered for 12 s",
        ),
        ("share", facts(tenant="lab", over_share=True), "tenant lab has its share of policy rr"),
        (
            "not_started",
            facts(launched=False, started_before=("a", "b")),
            "its process is not started yet: a and b are before it",
        ),
        (
            "taken",
            facts(demand=2, free=(), taken=TAKEN, policy_again_s=0.8),
            "waits for 2 devices; cuda:0 and cuda:1 are used by a and b; policy rr decides again in 0.8 s",
        ),
        (
            "taken",
            facts(demand=2, free=("cuda:1",), taken=(Use("cuda:0", ("a",), used=False),), queued_before=3),
            "waits for 2 devices; cuda:0 is reserved for a; only cuda:1 is free;"
            " 3 jobs are before it in policy rr",
        ),
        (
            "taken",
            facts(free=(), taken=TAKEN[:1], within=("node b",), memory=Memory(12 * GIB, "cuda:0", 8 * GIB)),
            "waits for 1 device on node b; cuda:0 is used by a;"
            " memory: needs 12.00 GiB, cuda:0 has 8.00 GiB left",
        ),
        ("not_chosen", facts(), "policy rr has not chosen it yet; cuda:0 and cuda:1 are free"),
        ("not_chosen", facts(computes=True), "policy rr computes its plan"),
        (
            "starting",
            facts(absent=(0,), not_for=(("node b", "there is no command train"),)),
            "its process is starting (3.0 s so far); node b cannot start it: there is no command train",
        ),
        (
            "taken",
            facts(free=(), taken=TAKEN, no_room=(("node b", "1 MiB left in its RAM disk"),)),
            "waits for 1 device; cuda:0 and cuda:1 are used by a and b;"
            " node b has 1 MiB left in its RAM disk",
        ),
    ],
)
def test_every_case_has_its_sentence(case: str, found: Facts, sentence: str | None) -> None:
    applies = next(one for one in CASES if one(found) is not None)
    assert (applies.__name__, why(found)) == (f"_{case}", sentence)


def test_no_case_is_without_a_test() -> None:
    tested = {mark.args[1][n][0] for mark in _marks() for n in range(len(mark.args[1]))}
    assert {f"_{case}" for case in tested} == {case.__name__ for case in CASES}


def _marks() -> Sequence[pytest.Mark]:
    return test_every_case_has_its_sentence.pytestmark  # type: ignore[attr-defined, no-any-return]


def test_long_lists_are_counted_and_times_have_units() -> None:
    assert [listed(names) for names in ("", "a", "ab", "abc", "abcde")] == [
        *("", "a", "a and b", "a, b and c"),
        "a, b, c and 2 more",
    ]
    assert [span(s) for s in (-1.0, 0.44, 41.2, 180.0, 8000.0)] == [
        "0.0 s",
        "0.4 s",
        "41 s",
        "3 min",
        "2.2 h",
    ]


def test_what_a_rank_said_when_it_refused_is_the_reason_of_both_jobs() -> None:
    policy = Scripted()
    driver = Driver(1, policy)
    driver.running_pair()
    policy.next = lambda _: Plan([Suspend("a"), Start("b", (0,))])
    driver.core.state.plan_due = True
    driver.wake()
    assert said(driver, "b").startswith("waits for null:0, which a still uses: it stops at its next boundary")
    driver.say("a", refused(1, 11, running=True))
    refusal = "its suspend was refused: no room; tried again in 0.5 s"
    assert said(driver, "a") == refusal
    assert said(driver, "b") == f"waits for null:0, which a still uses: {refusal}"


def test_what_ranks_report_while_they_train_is_told() -> None:
    driver = Driver(1)
    driver.running_pair()
    assert Blockers(driver.core, driver.now_s).why(driver.core.jobs["a"]) is None
    for field, sentence in (
        ("stuck", "no boundary at t.py:3, in f"),
        ("unleased", "4.00 MiB on cuda:1 without a lease: it cannot be suspended"),
    ):
        told = {field: "4.00 MiB on cuda:1" if field == "unleased" else "at t.py:3, in f"}
        driver.say("a", wire.Progress(epoch=1, boundary=10, step=10, **told))  # type: ignore[arg-type]
        assert said(driver, "a") == sentence


def test_a_policy_that_fails_is_named() -> None:
    def fail(view: View) -> Plan:
        raise KeyError("x")

    policy = Scripted()
    driver = Driver(1, policy)
    policy.next = fail
    driver.submit("a")
    driver.hello("a")
    assert said(driver, "a").startswith("policy scripted failed and is asked again in 1.0 s: ")
    assert "KeyError" in said(driver, "a")


def test_jobs_in_more_urgent_queues_are_counted() -> None:
    driver = Driver(1, make_policy("2das", {"thresholds": (2.0, 1000.0)}))
    driver.running_pair()
    driver.wake(3.0)
    driver.parked("a", driver.core.jobs["a"].asked.stop_at)
    driver.resumed("b")
    driver.submit("c")
    driver.hello("c")
    assert "; 1 job is before it in policy 2das" in said(driver, "a")
    assert "before it" not in said(driver, "c")


def said(driver: Driver, job: str) -> str:
    return Blockers(driver.core, driver.now_s).why(driver.core.jobs[job]) or ""


@pytest.mark.filterwarnings("ignore:HiGHS")
@pytest.mark.parametrize("seeds", [range(12)], ids=str)
def test_whoever_does_not_train_has_a_true_reason(seeds: range) -> None:
    for seed in seeds:
        world = World(seed)
        if world.draw.random() < 0.6:
            world.attempt(Limited(world.draw.choice([0, 1, 2])))
        for _ in range(STEPS):
            world.anything()
            blockers = Blockers(world.core, world.driver.now_s)
            for job in world.core.jobs.values():
                check(world.core, job, blockers.why(job))


class Watched(Live):
    """A world in virtual time in which the reasons of all jobs are looked at now and then."""

    def __init__(self, scenario: Scenario) -> None:
        self.cores: list[Core] = []
        self.steps = 0
        super().__init__(scenario, self._made)

    def _made(self, scenario: Scenario) -> Core:
        self.cores.append(todays_core(scenario))
        return self.cores[-1]

    def _step(self) -> bool:
        stepped = super()._step()
        self.steps += 1
        if self.scheduler is not None and self.steps % 7 == 0:
            core = self.cores[-1]
            blockers = Blockers(core, self.ground.loop.now_s)
            for job in core.jobs.values():
                check(core, job, blockers.why(job))
        return stepped


@pytest.mark.parametrize("seeds", [range(6)], ids=str)
def test_in_whole_worlds_the_reasons_are_true(seeds: range) -> None:
    for seed in seeds:
        Watched(draw_scenario(seed)).run()


def check(core: Core, job: Gang, sentence: str | None) -> None:
    if job.state.ended:
        assert (sentence is None) == job.processes_gone
        return
    if sentence is None:
        assert job.activity is Activity.TRAINS, f"{job.id} is {job.state.value}, and nobody knows why"
        assert job.processes.trains
        return
    names = [str(device) for device in core.devices]
    used = {name: set(found) for name, found in zip(names, core.state.occupants, strict=True)}
    wanted = {name: {other.id for other in core.state.holders(n)} for n, name in enumerate(names)}
    for devices, jobs in clauses(core, sentence, "used by"):
        assert all(used[device] for device in devices), sentence
        assert jobs <= set().union(*used.values()) - {job.id}, sentence
    for devices, jobs in clauses(core, sentence, "reserved for"):
        assert all(wanted[device] - {job.id} and not used[device] for device in devices), sentence
        assert jobs <= set().union(*wanted.values()), sentence
    for devices, _ in clauses(core, sentence, "free"):
        assert not any(used[device] or wanted[device] - {job.id} for device in devices), sentence
    if (found := re.match(r"waits for (\S+), which (\S+) still uses", sentence)) is not None:
        assert found[2] in used[found[1]], sentence
    if sentence.startswith("held"):
        assert job.held, sentence
    if (found := re.match(r"its state can be only on (\S+), which (\S+) ha", sentence)) is not None:
        assert found[2] in used[found[1]] | wanted[found[1]], sentence
        assert job.bound, sentence


def clauses(core: Core, sentence: str, verb: str) -> list[tuple[set[str], set[str]]]:
    """The devices and the jobs that a sentence names on both sides of a verb."""
    found = []
    for part in sentence.split("; "):
        if (match := re.match(rf"(?:only )?(.*) (?:is|are) {verb}(.*)$", part)) is not None:
            names, jobs = (set(re.split(r", | and | ", words.strip())) for words in match.groups())
            found.append((names & set(map(str, core.devices)), jobs & core.jobs.keys()))
    return found
