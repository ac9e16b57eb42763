"""Deliveries in threads: commands that hang hold up neither the caller nor messages; failures come back."""

from __future__ import annotations

import json
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuslice.sched_core.ends import tries
from gpuslice.sched_core.ends.deliveries import _AT_ONCE, Deliveries
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.lifecycle.events import Cancelled, Noted, Submitted

from ...patience import PATIENCE_MS, PATIENCE_S
from ..driver import PROGRAM, Driver

JOBS = _AT_ONCE + 2


class Ending:
    """Jobs that end, and their deliveries; commands last until they are let go."""

    def __init__(self, path: Path) -> None:
        self.driver = Driver()
        self.begun, self.go = threading.Semaphore(0), threading.Event()
        self.variables: list[dict[str, str]] = []
        self.messages: list[dict[str, object]] = []
        self.failing = 0
        self.deliveries = Deliveries(
            self.driver.core,
            self.driver.job_history.ends,
            path,
            lambda job, name: path / f"{job}.{name}",
            lambda: self.driver.now_s,
            lambda at_s: 1e9 + at_s,
            self.note,
        )
        self.deliveries.begin()

    def note(self, note: Noted) -> None:
        self.driver.do(note)

    def run(self, command: str, environ: dict[str, str], directory: str, output: Path) -> str:
        self.begun.release()
        assert self.go.wait(PATIENCE_S)
        self.variables.append(environ)
        return ""

    def post(self, url: str, body: bytes) -> str:
        self.messages.append(json.loads(body))
        self.failing -= 1
        return "HTTP status 500" if self.failing >= 0 else ""

    def end(self, job: str, **fields: str) -> None:
        self.driver.do(Submitted(JobSpec(id=job, submit_s=0.25, hold=True, **fields), PROGRAM))  # type: ignore[arg-type]
        self.driver.do(Cancelled(job, "enough\0"))
        self.deliveries.see()

    def settle(self) -> None:
        """Serve until nothing is tried."""
        while not self.deliveries.settled:
            poller = select.poll()
            poller.register(self.deliveries.fileno(), select.POLLIN)
            assert poller.poll(PATIENCE_MS)
            self.deliveries.advance()


@pytest.fixture
def ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ending]:
    found = Ending(tmp_path)
    monkeypatch.setattr(tries, "run", found.run)
    monkeypatch.setattr(tries, "post", found.post)
    yield found
    found.go.set()
    found.deliveries.close()


def test_commands_that_hang_hold_up_no_message_and_are_few_at_a_time(ending: Ending) -> None:
    for number in range(JOBS):
        ending.end(f"j{number}", on_end="true")
    ending.end("m", notify="http://h/")
    record = ending.driver.job_history.ends
    while any(one.kind == "notify" for one in record.owed.values()):
        poller = select.poll()
        poller.register(ending.deliveries.fileno(), select.POLLIN)
        assert poller.poll(PATIENCE_MS)
        ending.deliveries.advance()
    for _ in range(_AT_ONCE):
        assert ending.begun.acquire(timeout=PATIENCE_S)
    assert not ending.begun.acquire(blocking=False), "the rest waits for them"
    assert not ending.deliveries.settled
    ending.go.set()
    ending.settle()
    assert not record.owed
    assert {one["GPUSLICE_JOB"] for one in ending.variables} == {f"j{number}" for number in range(JOBS)}
    (message,) = ending.messages
    assert (message["id"], message["state"], message["ended_unix_s"]) == ("m", "cancelled", 1e9 + 0.25)
    assert (message["began_unix_s"], message["exit_code"]) == (None, None)
    assert ending.variables[0]["GPUSLICE_REASON"] == "enough"
    assert ending.variables[0]["GPUSLICE_EXIT_CODE"] == ""


def test_a_message_that_failed_is_sent_again_when_its_pause_is_over(ending: Ending) -> None:
    ending.failing = 1
    ending.end("m", notify="http://h/")
    ending.settle()
    (delivery,) = ending.driver.job_history.ends.owed.values()
    assert (delivery.tries, delivery.error, len(ending.messages)) == (1, "HTTP status 500", 1)
    ending.driver.now_s = delivery.again_s
    ending.deliveries._wake()  # as the timer does
    ending.deliveries.advance()
    ending.settle()
    assert not delivery.owed
    assert len(ending.messages) == 2


def test_what_is_given_up_is_not_owed_any_more(ending: Ending) -> None:
    ending.failing = 1
    ending.end("m", notify="http://h/")
    ending.settle()
    ending.deliveries.give_up()
    (delivery,) = ending.driver.job_history.ends.newest(ending.driver.core.jobs["m"])
    assert (delivery.owed, delivery.error) == (False, "HTTP status 500")
