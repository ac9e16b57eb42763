"""States on their way to another node: that they have arrived, or why not."""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpuslice.sched_core.nodes.transfers import Transfers

from ...patience import PATIENCE_S


class Told:
    def __init__(self, script: str) -> None:
        self.done: list[tuple[str, str]] = []
        self.waits: list[str] = []
        self.transfers = Transfers(
            lambda job, *words: [sys.executable, "-c", script, job, *map(",".join, words)]
        )

    def begin(self, job: str, node: str = "b", *, patient: bool = False) -> None:
        waiting = self.waits.append if patient else None
        self.transfers.begin(
            job, ("s", ""), (node, "b"), lambda error: self.done.append((job, error)), waiting
        )

    def finish(self, count: int = 1) -> list[tuple[str, str]]:
        while len(self.done) < count:
            assert select.select([self.transfers.fileno()], [], [], PATIENCE_S)[0]
            self.transfers.reap()
        return self.done


@pytest.fixture
def made() -> Iterator[list[Told]]:
    found: list[Told] = []
    yield found
    for told in found:
        told.transfers.close()


def begin(made: list[Told], script: str) -> Told:
    made.append(Told(script))
    made[-1].begin("a")
    return made[-1]


def test_how_far_it_has_come_can_be_read(made: list[Told], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    tell = (
        "from gpuslice.sched_core.nodes.transfers import tell_progress as tell; tell(1, 0, 9); tell(1, 7, 9)"
    )
    told = begin(made, f"{tell}; open({str(gate)!r}).read()")
    with gate.open("w"):  # it has told
        assert told.transfers.progress("a") == (7, 9)
        assert told.transfers.progress("b") is None
    assert told.finish() == [("a", "")]
    assert told.transfers.progress("a") is None


def test_its_command_is_told_what_to_bring(made: list[Told]) -> None:
    told = begin(made, "import sys; assert sys.argv[1:] == ['a', 's,', 'b,b']")
    assert told.transfers.under_way("a")
    assert told.finish() == [("a", "")]
    assert not told.transfers.under_way("a")


def test_a_failure_says_why(made: list[Told]) -> None:
    assert begin(made, "import sys; sys.exit('no room')").finish() == [("a", "no room")]


def test_one_that_says_nothing_is_a_failure_too(made: list[Told]) -> None:
    assert begin(made, "import os; os._exit(7)").finish() == [("a", "exit code 7")]


def test_one_that_is_cancelled_has_not_arrived(made: list[Told]) -> None:
    told = begin(made, "import signal; signal.pause()")
    told.transfers.cancel("a")
    assert told.finish() == [("a", "exit code -9")]


def test_of_each_job_one_is_under_way_at_a_time(made: list[Told]) -> None:
    told = begin(made, "import sys; sys.exit(sys.argv[3][0])")
    told.begin("a", "c")
    told.begin("x", "d")
    assert sorted(told.finish(3)) == [("a", "b"), ("a", "c"), ("x", "d")]
    assert [error for job, error in told.done if job == "a"] == ["b", "c"]


def test_what_waits_for_one_that_is_cancelled_is_cancelled_too(made: list[Told]) -> None:
    told = begin(made, "import signal; signal.pause()")
    told.begin("a", "c")
    told.transfers.cancel("a")
    assert told.finish(2) == [("a", "it was given up"), ("a", "exit code -9")]


@pytest.mark.parametrize("refused", ["memfd_create", "pidfd_open"])
def test_one_that_cannot_be_started_says_why(
    made: list[Told], monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = psutil.Process().children()
    with monkeypatch.context() as patched:
        patched.setattr(os, refused, refuse)
        told = begin(made, "import signal; signal.pause()")
    assert told.done == [("a", "[Errno 24] Too many open files")]
    assert not told.transfers.under_way("a")
    assert psutil.Process().children() == before


def test_what_follows_one_that_cannot_be_started_is_told_too(
    made: list[Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = begin(made, "pass")
    told.begin("a", "c")
    assert select.select([told.transfers.fileno()], [], [], PATIENCE_S)[0]
    monkeypatch.setattr(told.transfers, "_command", lambda *_: Path("/no/such/wanted").read_text())
    told.transfers.reap()
    assert told.done == [("a", ""), ("a", "[Errno 2] No such file or directory: '/no/such/wanted'")]


#: Cannot reach a node before the third attempt.
AWAY = """
import pathlib, sys
attempts = pathlib.Path({path!r})
attempts.write_text(attempts.read_text() + "x" if attempts.exists() else "x")
if len(attempts.read_text()) < 3:
    sys.stderr.write("nobody answers")
    sys.exit(3)
"""


def test_it_is_tried_again_while_a_node_cannot_be_reached(made: list[Told], tmp_path: Path) -> None:
    made.append(told := Told(AWAY.format(path=str(tmp_path / "attempts"))))
    told.begin("a", patient=True)
    told.begin("a", "c")
    assert told.finish(2) == [("a", ""), ("a", "")]
    assert told.waits == ["nobody answers"] * 2


def test_who_does_not_wait_is_told_at_once_that_a_node_cannot_be_reached(
    made: list[Told], tmp_path: Path
) -> None:
    assert begin(made, AWAY.format(path=str(tmp_path / "attempts"))).finish() == [("a", "nobody answers")]


def test_one_that_waits_can_be_cancelled(made: list[Told]) -> None:
    made.append(told := Told("import sys; sys.exit(3)"))
    told.begin("a", patient=True)
    while not told.waits:
        assert select.select([told.transfers.fileno()], [], [], PATIENCE_S)[0]
        told.transfers.reap()
    told.transfers.cancel("a")
    ((job, _),) = told.finish()
    assert job == "a"
    assert not told.transfers.under_way("a")


def test_one_that_could_not_reach_a_node_as_it_was_cancelled_is_not_tried_again(made: list[Told]) -> None:
    made.append(told := Told("import sys; sys.exit(3)"))
    told.begin("a", patient=True)
    assert select.select([told.transfers.fileno()], [], [], PATIENCE_S)[0]  # it has ended, and nobody knows
    told.transfers.cancel("a")
    told.transfers.reap()
    assert told.done == [("a", "exit code 3")]
    assert not told.waits


#: Says the words that it was told.
STANDBY = "import json, sys; sys.exit(' '.join(json.load(sys.stdin)))"


def test_a_process_that_stands_by_is_told_its_words(made: list[Told]) -> None:
    told = Told("")
    made.append(told)
    told.transfers.close()
    told.transfers = Transfers(
        lambda job, *words: [job, *map(",".join, words)], [sys.executable, "-c", STANDBY]
    )
    told.transfers.stand_by()
    told.transfers.stand_by()
    assert len(psutil.Process().children()) == 1
    told.begin("a")
    assert told.finish() == [("a", "a s, b,b")]
    told.begin("a")  # that is started as ever, and there is no command "a"
    assert "a" in told.finish(2)[1][1]
    told.transfers.stand_by()
    (child,) = psutil.Process().children()
    told.transfers.close()
    assert not child.is_running()
    told.transfers = Transfers(lambda *_: [])
