"""The talk of a swap: who is let in, what is believed, and how each end learns of the other's."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from gpuslice.checkpoint.files import short_path
from gpuslice.checkpoint.switch import swap_protocol
from gpuslice.checkpoint.switch.swap_endpoints import PredecessorEnd, Successor, SuccessorEnd, SwapListener
from gpuslice.checkpoint.switch.swap_protocol import SOCKET, VERSION, Back, End, Gave, Offer, Terms, Whole
from gpuslice.errors import HandoverError

from ...patience import PATIENCE_S

TERMS = Terms("a", "b", 4, "cuda:0")
SHORT_S = 0.05


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[SwapListener]:
    opened = SwapListener(tmp_path, TERMS, patience_s=PATIENCE_S)
    yield opened
    opened.close()


class Meeting:
    """A predecessor that knocks from a thread of its own, because it waits for an answer."""

    def __init__(self, directory: Path, terms: Terms = TERMS, patience_s: float = PATIENCE_S) -> None:
        self.predecessor: PredecessorEnd | None = None
        successor = Successor(directory, terms, patience_s=patience_s)

        def meet() -> None:
            self.predecessor = successor.meet(1000)

        self._thread = threading.Thread(target=meet)
        self._thread.start()

    def join(self) -> PredecessorEnd | None:
        self._thread.join(PATIENCE_S)
        return self.predecessor


@pytest.fixture
def ends(listener: SwapListener, tmp_path: Path) -> Iterator[tuple[PredecessorEnd, SuccessorEnd]]:
    """Both ends of a swap whose successor takes part."""
    meeting = Meeting(tmp_path)
    successor = listener.await_predecessor(PATIENCE_S)
    assert successor is not None
    successor.answer()
    predecessor = meeting.join()
    assert predecessor is not None
    assert predecessor.problem == ""
    yield predecessor, successor
    predecessor.close()
    successor.close()


def test_what_one_gives_the_other_sees(ends: tuple[PredecessorEnd, SuccessorEnd]) -> None:
    predecessor, successor = ends
    assert (successor.offered_bytes, successor.given_bytes) == (1000, 0)
    predecessor.gave(300)
    predecessor.gave(200)  # it does not get less
    successor.await_given(300)
    assert (successor.given_bytes, successor.vacated) == (300, False)
    predecessor.whole()
    successor.await_given(10**9)
    assert successor.vacated


def test_an_offer_of_nothing_waits_for_no_answer_and_gets_none(
    listener: SwapListener, tmp_path: Path
) -> None:
    predecessor = Successor(tmp_path, TERMS, overlapped=False).meet(
        1000
    )  # nobody has come to the listener yet
    assert predecessor is not None
    assert predecessor.problem
    assert select.select([listener.fileno()], [], [], PATIENCE_S)[0]
    successor = listener.await_predecessor(0.0)
    assert successor is not None
    successor.answer("it comes when the other has left")
    successor.take_in()
    assert (successor.offered_bytes, successor.vacated) == (0, False)
    predecessor.whole()
    predecessor.close()
    assert select.select(successor.filenos(), [], [], PATIENCE_S)[0]
    successor.take_in()
    assert successor.vacated
    successor.close()


def test_the_door_is_the_user_s_alone_and_is_gone_when_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    listener = SwapListener(tmp_path, TERMS)
    assert stat.S_ISSOCK((tmp_path / SOCKET).stat().st_mode)
    listener.close()
    listener.close()
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_too_long_for_a_socket_is_no_obstacle(tmp_path: Path) -> None:
    directory = tmp_path / ("x" * 150)
    directory.mkdir()
    listener = SwapListener(directory, TERMS)
    meeting = Meeting(directory)
    successor = listener.await_predecessor(PATIENCE_S)
    assert successor is not None
    successor.answer("no")
    predecessor = meeting.join()
    assert predecessor is not None
    assert predecessor.problem == "no"
    predecessor.close()
    successor.close()
    listener.close()


def test_the_socket_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    stale = swap_protocol.new_socket()
    with short_path(tmp_path / swap_protocol.SOCKET) as address:
        stale.bind(address)
    stale.close()
    assert Successor(tmp_path, TERMS).meet(1) is None
    SwapListener(tmp_path, TERMS).close()


def test_nobody_waits_where_there_is_no_door(tmp_path: Path) -> None:
    assert Successor(tmp_path, TERMS).meet(1) is None
    assert Successor(tmp_path / "nowhere", TERMS).meet(1) is None


def raw(directory: Path) -> socket.socket:
    connection = swap_protocol.new_socket()
    with short_path(directory / swap_protocol.SOCKET) as address:
        connection.connect(address)
    return connection


STRANGERS: dict[str, Callable[[socket.socket], object]] = {
    "silent": lambda connection: None,
    "babbling": lambda connection: connection.send(b"\xff\x00 let me in"),
    "impatient": lambda connection: connection.send(msgspec.msgpack.encode(Gave(5))),
    "from the future": lambda connection: connection.send(
        msgspec.msgpack.encode(Offer(VERSION + 1, TERMS, 5))
    ),
    "late": lambda connection: connection.send(
        msgspec.msgpack.encode(Offer(VERSION, Terms("a", "b", 3, "cuda:0"), 5))
    ),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_are_not_let_in(tmp_path: Path, kind: str) -> None:
    listener = SwapListener(tmp_path, TERMS, patience_s=SHORT_S)
    stranger = raw(tmp_path)
    STRANGERS[kind](stranger)
    assert listener.await_predecessor(10 * SHORT_S) is None
    stranger.close()
    listener.close()


def test_one_with_other_terms_gives_nothing_early_and_the_right_one_comes_after_it(
    listener: SwapListener, tmp_path: Path
) -> None:
    wrong = Meeting(tmp_path, Terms("c", "b", 4, "cuda:0"))
    found: list[SuccessorEnd | None] = []
    waiting = threading.Thread(target=lambda: found.append(listener.await_predecessor(PATIENCE_S)))
    waiting.start()
    refused = wrong.join()
    assert refused is not None
    assert refused.problem
    refused.close()
    right = Meeting(tmp_path)
    waiting.join(PATIENCE_S)
    successor = found[0]
    assert successor is not None
    successor.answer()
    predecessor = right.join()
    assert predecessor is not None
    predecessor.close()
    successor.close()


def test_an_answer_that_does_not_come_means_no(listener: SwapListener, tmp_path: Path) -> None:
    predecessor = Meeting(tmp_path, patience_s=SHORT_S).join()
    assert predecessor is not None
    assert "silent" in predecessor.problem
    predecessor.close()


def test_a_predecessor_that_fails_wants_everything_back(ends: tuple[PredecessorEnd, SuccessorEnd]) -> None:
    predecessor, successor = ends
    predecessor.gave(500)
    predecessor.failed(ValueError("x" * 10_000))
    with pytest.raises(
        HandoverError, match="a, which was to make room on cuda:0, could not leave: ValueError"
    ):
        successor.await_given(1)
    assert not predecessor.await_back(SHORT_S)
    successor.back()
    assert predecessor.await_back(PATIENCE_S)


def test_a_silent_predecessor_is_not_waited_for_longer_than_told(tmp_path: Path) -> None:
    listener = SwapListener(tmp_path, TERMS, patience_s=SHORT_S)
    connection = raw(tmp_path)
    connection.send(msgspec.msgpack.encode(Offer(VERSION, TERMS, 5)))
    successor = listener.await_predecessor(PATIENCE_S)
    assert successor is not None
    with pytest.raises(HandoverError, match="not said a word"):
        successor.await_given(1)
    with pytest.raises(HandoverError, match="not said a word"):
        successor.await_vacated()
    successor.close()
    connection.close()
    listener.close()


def test_a_predecessor_that_leaves_without_a_word_and_lives_on_has_not_left_the_device(
    tmp_path: Path,
) -> None:
    """Its memory may still be there: this is no end of a process."""
    listener = SwapListener(tmp_path, TERMS, patience_s=SHORT_S)
    connection = raw(tmp_path)
    connection.send(msgspec.msgpack.encode(Offer(VERSION, TERMS, 5)))
    successor = listener.await_predecessor(PATIENCE_S)
    assert successor is not None
    connection.close()
    with pytest.raises(HandoverError, match="left the swap without a word"):
        successor.await_vacated()
    successor.close()
    listener.close()


def test_nonsense_is_no_message(tmp_path: Path, listener: SwapListener) -> None:
    connection = raw(tmp_path)
    connection.send(msgspec.msgpack.encode(Offer(VERSION, TERMS, 5)))
    successor = listener.await_predecessor(PATIENCE_S)
    assert successor is not None
    connection.send(msgspec.msgpack.encode(Back()))
    with pytest.raises(HandoverError, match="no message"):
        successor.await_given(1)
    successor.close()
    connection.close()


def in_a_child(directory: Path, act: Callable[[socket.socket], object]) -> int:
    """A process that knocks, makes an offer, acts, and waits for its end."""
    pid = os.fork()
    if pid == 0:
        try:
            connection = raw(directory)
            connection.send(msgspec.msgpack.encode(Offer(VERSION, TERMS, 5)))
            act(connection)
            signal.pause()
        finally:
            os._exit(1)
    return pid


def end(pid: int) -> None:
    process = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([process], [], [], PATIENCE_S)[0]
    os.close(process)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_end_of_the_predecessor_s_process_makes_the_device_the_successor_s(
    tmp_path: Path, listener: SwapListener
) -> None:
    """Also while it has children that inherited its end of the swap."""

    def have_a_child(connection: socket.socket) -> None:
        connection.set_inheritable(True)
        parent = os.getpid()
        if os.fork() == 0:
            os.close(1)
            while os.getppid() == parent:  # whoever takes in orphans: not always process 1
                signal.sigtimedwait([], 0.1)
            os._exit(0)
        connection.send(msgspec.msgpack.encode(Gave(2)))

    pid = in_a_child(tmp_path, have_a_child)
    successor = listener.await_predecessor(PATIENCE_S)
    assert successor is not None
    successor.await_given(2)
    assert not successor.vacated
    end(pid)
    successor.await_vacated()
    assert successor.vacated
    successor.close()
    os.waitpid(pid, 0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_words_said_before_the_end_count(tmp_path: Path, listener: SwapListener) -> None:
    def say(connection: socket.socket) -> None:
        connection.send(msgspec.msgpack.encode(Whole()))

    pid = in_a_child(tmp_path, say)
    successor = listener.await_predecessor(PATIENCE_S)
    assert successor is not None
    end(pid)
    successor.await_given(10)
    assert successor.vacated
    successor.close()
    os.waitpid(pid, 0)


def test_a_successor_that_does_not_read_holds_nobody_up(ends: tuple[PredecessorEnd, SuccessorEnd]) -> None:
    predecessor, successor = ends
    for nbytes in range(5000):  # far more than a socket keeps
        predecessor.gave(nbytes)
    thread = threading.Thread(target=predecessor.whole)  # this one must arrive
    thread.start()
    successor.await_vacated()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_successor_that_is_gone_holds_nobody_up(ends: tuple[PredecessorEnd, SuccessorEnd]) -> None:
    predecessor, successor = ends
    successor._socket.close()
    predecessor.gave(1)
    predecessor.whole()
    predecessor.failed(ValueError())
    assert not predecessor.await_back(SHORT_S)  # its process is this one, and lives on


def test_a_process_with_more_open_files_than_select_can_take_still_sees_the_other_s_end(
    ends: tuple[PredecessorEnd, SuccessorEnd],
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        predecessor, _ = ends
        low = predecessor._process
        predecessor._process = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1024)
        os.close(low)
        assert not predecessor.await_end(0.0)  # its process is this one, and lives on
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_successor_without_descriptors_declines_and_stays_parked(
    tmp_path: Path, listener: SwapListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: socket.socket) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket.socket, "accept", fails)
    with pytest.raises(HandoverError, match=f"{tmp_path}.*{os.strerror(errno.EMFILE)}"):
        listener.await_predecessor(0.0)


def test_a_process_that_cannot_be_watched_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(HandoverError, match="is user"):
        End(one, swap_protocol.from_predecessor, 1.0)
    monkeypatch.undo()

    def refuse(pid: int) -> int:
        raise ProcessLookupError(3, "No such process")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(HandoverError, match="cannot be watched"):
        End(one, swap_protocol.from_predecessor, 1.0)
    one.close()
    other.close()
