"""The journal tells why a job has waited for long, once for each reason."""

from __future__ import annotations

from gpuslice.sched_core.lifecycle.events import Held, Noted, Released
from gpuslice.sched_core.live import wait_notes
from gpuslice.sched_core.live.wait_notes import LONG_S, WaitNotes

from ..driver import Driver, Scripted


class Noting:
    """A driver, and what is noted while time passes."""

    def __init__(self) -> None:
        self.driver = Driver(1, Scripted())
        self.found: list[Noted] = []
        self.notes = WaitNotes(self.driver.core, lambda: self.driver.now_s, self.found.append)

    def wait(self, seconds: float) -> list[tuple[str, str]]:
        """Look every second; return what was noted, and of whom."""
        self.found.clear()
        for _ in range(int(seconds)):
            self.driver.now_s += 1.0
            self.notes.look()
        return [(note.job, str(note.details["why"])) for note in self.found]


def test_a_reason_that_lasts_is_told_once_until_the_job_trains() -> None:
    noting = Noting()
    driver = noting.driver
    driver.running_pair()
    assert noting.wait(LONG_S) == []
    assert noting.wait(20) == [("b", "waits for 1 device; null:0 is used by a")]
    assert noting.wait(3 * LONG_S) == []
    driver.do(Held("b"))
    held = ("b", "held by its owner (`gpuslice resume b`)")
    assert noting.wait(LONG_S + 20) == [held]
    driver.do(Released("b"))
    assert noting.wait(2 * LONG_S) == [], "that was told"
    driver.do(Held("a"))
    driver.parked("a", driver.core.jobs["a"].asked.stop_at)
    driver.resumed("b")
    driver.progress("b", 3)
    assert noting.wait(20) == []
    driver.do(Held("b"))
    driver.parked("b", driver.core.jobs["b"].asked.stop_at)
    assert held in noting.wait(LONG_S + 20), "it has trained in between"


def test_of_many_jobs_each_has_its_turn() -> None:
    noting = Noting()
    for number in range(2 * wait_notes._AT_ONCE + 5):
        noting.driver.submit(f"j{number}")
    told = {job for job, _ in noting.wait(LONG_S + 60)}
    assert told == set(noting.driver.core.jobs)
