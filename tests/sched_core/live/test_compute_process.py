"""What takes a policy long to compute: beside the scheduler, which goes on serving."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpuslice import Client
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.journal.journal import Journal
from gpuslice.sched_core.lifecycle.events import Command, Compute, Computed, Event, Submitted
from gpuslice.sched_core.live.client_socket import ClientSocket
from gpuslice.sched_core.live.job_history import JobHistory
from gpuslice.sched_core.live.scheduler import Scheduler
from gpuslice.sched_core.live.status import Overview
from gpuslice.sched_core.policies.chronus import milp, planner
from gpuslice.sched_core.policies.chronus.leases import LeasePlan
from gpuslice.sched_core.policies.chronus.policy import Chronus
from gpuslice.sched_core.policies.fifo import Fifo
from gpuslice.sched_core.policy import Plan, Task, View
from gpuslice.verbs import SchedulerStatus

from ...patience import PATIENCE_S
from ..allocation.test_deadlines import obey, train
from ..driver import PROGRAM, Driver, devices, notices

WAITS = """
def wait(fifo):
    print("not the answer")
    with open(fifo) as file:
        return file.readline().encode()

def fail(_):
    raise ValueError("no way")
"""


class Asking(Fifo):
    """First in first out, with a question."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._task = task
        self.answers: list[bytes | None] = []

    def plan(self, view: View) -> Plan:
        self.answers.append(view.compute(self._task))
        return super().plan(view)


class Office:
    """A scheduler with a client socket, without jobs."""

    def __init__(self, directory: Path, policy: Asking) -> None:
        self.directory = directory
        self.events: list[Event] = []
        self.core = Core(devices(1), policy)
        self.job_history = JobHistory(self.core)
        self.scheduler = Scheduler(self.core, directory, observer=self._observe)
        self.journal = Journal(directory / "journal.sqlite")
        self.answered = os.eventfd(0)
        self.scheduler.register(self.answered, lambda: os.eventfd_read(self.answered))
        overview = Overview(self.core, self.job_history, policy="asking", pid=os.getpid())
        self.client_socket = ClientSocket(self.scheduler, directory, self.journal, overview)

    def _observe(self, event: Event, now: float, commands: list[Command]) -> None:
        self.events.append(event)
        self.job_history.note(event, now, commands)

    def submit(self, job: str) -> None:
        """A job that is of no consequence: it ends at once."""
        self.scheduler.submit(JobSpec(id=job, submit_s=0.0), PROGRAM)

    def let_ask(self) -> None:
        """Bring the policy to ask its question."""
        self.submit("a")
        computations = self.core.allocation.planning.computations
        assert self.scheduler.run(
            lambda: computations.unanswered is not None and self.core.jobs["a"].processes_gone,
            timeout_s=PATIENCE_S,
        )

    def ps(self) -> SchedulerStatus:
        """The answer to somebody who asks from outside while the scheduler serves."""
        found: list[SchedulerStatus] = []

        def ask() -> None:
            with Client(self.directory) as client:
                found.append(client.status())
            os.eventfd_write(self.answered, 1)

        asking = threading.Thread(target=ask)
        asking.start()
        assert self.scheduler.run(lambda: bool(found), timeout_s=PATIENCE_S)
        asking.join()
        return found[0]

    def close(self) -> None:
        self.client_socket.close()
        self.scheduler.close()
        self.journal.close()
        os.close(self.answered)


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that the process that computes can import; returns a FIFO for its ``wait``."""
    (tmp_path / "waits.py").write_text(WAITS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    return fifo


@pytest.fixture
def offices(tmp_path: Path) -> Iterator[list[Office]]:
    opened: list[Office] = []
    yield opened
    for office in opened:
        office.close()


def test_users_are_answered_while_a_plan_is_being_computed(
    functions: Path, offices: list[Office], tmp_path: Path
) -> None:
    policy = Asking(Task("waits:wait", os.fsencode(functions)))
    office = Office(tmp_path / "s", policy)
    offices.append(office)
    held_open = os.open(functions, os.O_RDWR)
    office.let_ask()
    assert [job.state for job in office.ps().jobs] == ["failed"]
    office.submit("b")
    assert [job.id for job in office.ps().jobs] == ["a", "b"]
    assert set(policy.answers) == {None}
    os.write(held_open, b"forty-two\n")
    assert office.scheduler.run(lambda: b"forty-two\n" in policy.answers, timeout_s=PATIENCE_S)
    assert Computed(1, b"forty-two\n") in office.events
    os.close(held_open)


def test_what_cannot_be_computed_is_the_policy_s_failure(
    functions: Path, offices: list[Office], tmp_path: Path
) -> None:
    office = Office(tmp_path / "s", Asking(Task("waits:fail", b"")))
    offices.append(office)
    office.let_ask()
    assert office.scheduler.run(
        lambda: any("waits:fail ended with exit code 1" in str(event) for event in office.events),
        timeout_s=PATIENCE_S,
    )
    assert office.ps().job_count == 1


def test_what_cannot_be_begun_is_answered_and_asked_for_again(
    functions: Path, offices: list[Office], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    policy = Asking(Task("waits:wait", os.fsencode(functions)))
    office = Office(tmp_path / "s", policy)
    offices.append(office)
    with monkeypatch.context() as patched:
        patched.setattr(os, "memfd_create", refuse)
        office.submit("a")
        assert office.scheduler.run(lambda: bool(policy.answers), timeout_s=PATIENCE_S)
    why = "waits:wait cannot be begun: [Errno 24] Too many open files"
    assert Computed(1, error=why) in office.events
    held_open = os.open(functions, os.O_RDWR)
    os.write(held_open, b"forty-two\n")
    office.submit("b")
    assert office.scheduler.run(lambda: b"forty-two\n" in policy.answers, timeout_s=PATIENCE_S)
    os.close(held_open)


def test_a_scheduler_that_leaves_ends_what_it_has_computed(functions: Path, tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    office = Office(tmp_path / "s", Asking(Task("waits:wait", os.fsencode(functions))))
    office.let_ask()
    assert set(psutil.Process().children()) - before
    office.close()
    assert not set(psutil.Process().children()) - before


@pytest.fixture
def hesitant(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Chronus with greedy plans that are never good enough, so that the solver is asked every time."""
    monkeypatch.setattr(planner, "greedy_plan", lambda *_, **__: LeasePlan({}, 0.0))
    return Driver(1, chronus())


def chronus() -> Chronus:
    return Chronus(lease_s=4.0, best_effort_lease_s=2.0, horizon=20, solver="highs")


def submit(driver: Driver, job: str, *, steps: int, deadline_s: float) -> Gang:
    spec = JobSpec(id=job, submit_s=driver.now_s, steps=steps, deadlines=((deadline_s, 1.0),))
    driver.do(Submitted(spec, PROGRAM))
    driver.hello(job)
    obey(driver)
    return driver.core.jobs[job]


def asked(driver: Driver) -> Compute:
    found = driver.core.allocation.planning.computations.unanswered
    assert found is not None
    return found


def solve(driver: Driver) -> None:
    command = asked(driver)
    driver.do(Computed(command.number, command.task.compute()))
    obey(driver)


def test_a_deadline_is_guaranteed_once_the_solver_has_seen_how(hesitant: Driver) -> None:
    job = submit(hesitant, "a", steps=100, deadline_s=60.0)
    train(hesitant, 1.0)
    assert job.guaranteed is None
    hesitant.submit("b")  # the world goes on meanwhile
    hesitant.hello("b")
    train(hesitant, 0.5)
    assert asked(hesitant).number == 1, "one question at a time"
    solve(hesitant)
    assert job.guaranteed is True


def test_a_solver_that_fails_costs_guarantees_but_no_plan(hesitant: Driver) -> None:
    job = submit(hesitant, "a", steps=100, deadline_s=60.0)
    train(hesitant, 1.0)
    hesitant.do(Computed(asked(hesitant).number, error="no licence"))
    # The second question is whether that would do if it went on until the next lease.
    commands = hesitant.do(Computed(asked(hesitant).number, error="no licence"))
    assert [notice.what for notice in notices(commands)] == ["not_guaranteed"]
    assert job.guaranteed is False
    assert job.state is JobState.RUNNING
    hesitant.submit("b")
    hesitant.hello("b")
    train(hesitant, 5.0)
    assert hesitant.core.allocation.planning.wake_s is not None


def test_an_answer_that_came_too_late_is_asked_for_again(hesitant: Driver) -> None:
    job = submit(hesitant, "a", steps=100, deadline_s=60.0)
    train(hesitant, 1.0)
    train(hesitant, 5.0)  # the leases it was about have begun
    solve(hesitant)
    assert job.guaranteed is None
    assert asked(hesitant).number == 2
    solve(hesitant)
    assert job.guaranteed is True


def test_a_lease_goes_on_with_the_solver_s_plan_and_nobody_loses_before(hesitant: Driver) -> None:
    first = submit(hesitant, "a", steps=100, deadline_s=13.0)
    train(hesitant, 1.0)
    solve(hesitant)
    hesitant.submit("b")
    hesitant.hello("b")
    train(hesitant, 3.0)
    obey(hesitant)
    assert hesitant.core.ledger.holders(0) == (hesitant.core.jobs["b"],), "the plan has no place for a"
    assert first.guaranteed is True
    solve(hesitant)
    assert hesitant.core.ledger.holders(0) == (first,)
    assert first.guaranteed is True


def test_a_journal_is_replayed_without_solving_anything_again(
    hesitant: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(hesitant, "a", steps=100, deadline_s=30.0)
    train(hesitant, 1.0)
    solve(hesitant)
    submit(hesitant, "b", steps=20, deadline_s=90.0)
    train(hesitant, 4.0)
    monkeypatch.setattr(milp, "solve", lambda *_, **__: pytest.fail("solved again"))
    replayed = hesitant.replayed(chronus())
    assert replayed.jobs["a"].guaranteed is True
    assert replayed.allocation.planning.computations.unanswered == asked(hesitant)
    assert [job.state for job in replayed.jobs.values()] == [job.state for job in hesitant.core.jobs.values()]
