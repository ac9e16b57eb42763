"""Two jobs in processes of their own that take turns on a device, and the two ways to do that."""

from __future__ import annotations

from pathlib import Path

from benchmarks.child import Child


class Job:
    """A process with one job in it (`benchmarks.duplex_swap.job`)."""

    def __init__(
        self, directory: Path, name: str, other: str, portion_bytes: int, state: str, device: str = "cpu"
    ) -> None:
        words = (state, device, directory, name, other, portion_bytes)
        self._child = Child("benchmarks.duplex_swap.job", *words)
        self.tell, self.listen, self.close = self._child.tell, self._child.listen, self._child.close
        pid, nbytes = self.listen().split()
        self.pid, self.nbytes = int(pid), int(nbytes)

    def do(self, word: str) -> None:
        """Have it done."""
        assert self._child.ask(word) == "done"


def a_pair(directory: Path, portion_bytes: int, state: str, device: str = "cpu") -> tuple[Job, Job]:
    """The first one runs, the other one is parked; their arenas are warm."""
    names = (("one", "two"), ("two", "one"))
    first, second = (Job(directory, *pair, portion_bytes, state, device) for pair in names)
    for job in (first, second):
        for word in ("suspend", "resume", "train", "suspend"):
            job.do(word)
    first.do("resume")
    return first, second


def one_after_the_other(leaving: Job, coming: Job) -> None:
    leaving.do("suspend")
    coming.do("resume")


def at_once(leaving: Job, coming: Job) -> None:
    coming.tell("arrive")
    assert coming.listen() == "open"
    leaving.tell("leave")
    assert coming.listen() == "done"
    assert leaving.listen() == "done"
