"""Output of jobs elsewhere is copied once, in order, from wherever a copy ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuslice.sched_core.nodes.log_copies import LogCopies, LogTails
from gpuslice.sched_core.nodes.node_wire import Printed


class Both:
    """An agent and a scheduler without anything between them; what was sent waits until it is delivered."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("there", "here"):
            (root / name).mkdir(exist_ok=True)
        self.sent: list[Printed] = []
        self.begin()

    def begin(self) -> None:
        """As after a new connection."""
        self.sent.clear()
        self.copies = LogCopies(lambda job, stream: self.root / "here" / f"{job}.{stream}")
        self.tails = LogTails(lambda job, stream: self.root / "there" / f"{job}.{stream}", self.sent.append)
        self.tails.follow("a", self.copies.copied("a", "b"))

    def print(self, text: bytes) -> None:
        with (self.root / "there" / "a.out").open("ab") as file:
            file.write(text)

    def deliver(self, *, acknowledge: bool = True) -> None:
        self.tails.send()
        while self.sent:
            part = self.sent.pop(0)
            end = self.copies.store("b", part)
            if acknowledge:
                self.tails.stored(part.job, part.stream, end)

    @property
    def copy(self) -> bytes:
        return (self.root / "here" / "a.out").read_bytes()


def test_all_is_copied_however_much_it_is(tmp_path: Path) -> None:
    both = Both(tmp_path)
    text = bytes(range(256)) * 4096
    both.print(text)
    assert not both.tails.drained("a")
    both.deliver()
    both.print(b"end")
    both.deliver()
    assert both.copy == text + b"end"
    assert both.tails.drained("a")


def test_what_is_printed_after_the_end_holds_nothing_up(tmp_path: Path) -> None:
    both = Both(tmp_path)
    both.print(b"all of it")
    assert not both.tails.drained("a")
    both.tails.send()
    both.print(b", and more of a process that was left behind")
    part = both.sent.pop()
    both.tails.stored("a", part.stream, both.copies.store("b", part))
    assert both.tails.drained("a")
    both.print(b", and more")
    both.sent.clear()
    both.tails.send()
    assert both.sent == []


def test_one_part_is_under_way_at_a_time(tmp_path: Path) -> None:
    both = Both(tmp_path)
    both.print(b"x" * (1 << 20))
    both.tails.send()
    both.tails.send()
    assert len(both.sent) == 1


@pytest.mark.parametrize("stored", [False, True])
def test_a_part_that_was_under_way_is_there_once(tmp_path: Path, stored: bool) -> None:
    both = Both(tmp_path)
    both.print(b"first,")
    if stored:
        both.deliver(acknowledge=False)
    else:
        both.tails.send()
    both.begin()
    both.print(b"second")
    both.deliver()
    assert both.copy == b"first,second"


def test_of_several_nodes_each_is_copied_from_its_own_beginning(tmp_path: Path) -> None:
    both = Both(tmp_path)
    both.copies.store("c", Printed(job="a", stream="out", offset=0, data=b"c says;"))
    both.print(b"b says")
    both.begin()
    both.deliver()
    assert both.copy == b"c says;b says"
    assert both.copies.copied("a", "c") == (7, 0)


def test_what_was_copied_is_not_known_any_more_if_that_is_damaged(tmp_path: Path) -> None:
    both = Both(tmp_path)
    both.print(b"text")
    both.deliver()
    (tmp_path / "here" / "a.copied").write_bytes(b"\xff")
    assert both.copies.copied("a", "b") == (0, 0)
