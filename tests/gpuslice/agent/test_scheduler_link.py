"""The I/O thread of a rank: greetings, heartbeats, and what becomes of messages when the scheduler dies."""

from __future__ import annotations

import io
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import zmq

from gpuslice.agent.scheduler_link import HEARTBEAT_S, Link
from gpuslice.clock import Clock, MonotonicClock
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.wire import (
    PROTOCOL_VERSION,
    Bye,
    FromAgent,
    Hello,
    Overshot,
    Progress,
    Suspend,
    ToAgent,
    Welcome,
    decode_from_agent,
    encode,
)

from ...patience import PATIENCE_MS, PATIENCE_S

HELLO = Hello(version=PROTOCOL_VERSION, job="job", rank=0, world_size=1, pid=1)
BEAT = Progress(epoch=1, boundary=2, step=3)
OVERSHOT = Overshot(epoch=1, boundary=9)


class Scheduler:
    """A ROUTER socket."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._connections = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.bind(endpoint)

    def hear(self) -> FromAgent:
        identity, frame = self._socket.recv_multipart()
        assert identity == b"job:0"
        return decode_from_agent(frame)

    def hear_other_than_beats(self) -> FromAgent:
        while (message := self.hear()) == BEAT:
            pass
        return message

    def say(self, frame: bytes) -> None:
        self._socket.send_multipart([b"job:0", frame])

    def wait_for_a_connection(self) -> None:
        assert self._connections.poll(PATIENCE_MS)

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._connections.close()
        self._context.destroy(linger=0)


class StallingClock(MonotonicClock):
    """Keeps whoever asks for the time next, after a while, until something has been done."""

    def __init__(self) -> None:
        super().__init__()
        self._do: Callable[[], object] | None = None
        self._from_s = 0.0

    def stall(self, do: Callable[[], object]) -> None:
        """Most of a heartbeat's interval from now: who asks then has waited for the next heartbeat's time."""
        self._from_s = self.now() + HEARTBEAT_S / 2
        self._do = do

    def now(self) -> float:
        if self._do is not None and super().now() >= self._from_s:
            do, self._do = self._do, None
            do()
        return super().now()


class Rank:
    """A link and what it has heard."""

    def __init__(self, endpoint: str, clock: Clock | None = None) -> None:
        self.heard: queue.Queue[ToAgent] = queue.Queue()
        self.greeting: list[FromAgent] = [HELLO]
        #: What makes the next heartbeats, or takes the next messages.
        self.beats: queue.SimpleQueue[Callable[[], Progress]] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self.link = Link(
            endpoint,
            "job:0",
            greeting=lambda: self.greeting,
            progress=self._progress,
            handle=self._handle,
            clock=clock,
        )

    def _progress(self) -> Progress:
        return BEAT if self.beats.empty() else self.beats.get()()

    def _handle(self, message: ToAgent) -> Sequence[FromAgent]:
        if not self.failures.empty():
            raise self.failures.get()
        self.heard.put(message)
        return [OVERSHOT] if isinstance(message, Suspend) else []


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/link"


@pytest.fixture
def scheduler(endpoint: str) -> Iterator[Scheduler]:
    scheduler = Scheduler(endpoint)
    yield scheduler
    scheduler.close()


@pytest.fixture
def rank(endpoint: str) -> Iterator[Rank]:
    rank = Rank(endpoint)
    rank.link.start()
    yield rank
    rank.link.close()


def test_the_greeting_comes_first_and_heartbeats_follow(scheduler: Scheduler, rank: Rank) -> None:
    assert [scheduler.hear() for _ in range(3)] == [HELLO, BEAT, BEAT]


def test_what_is_handed_over_is_sent_in_order(scheduler: Scheduler, rank: Rank) -> None:
    assert scheduler.hear() == HELLO
    messages = [Overshot(epoch=1, boundary=boundary) for boundary in range(100)]
    for message in messages:
        rank.link.send(message)
    assert [scheduler.hear_other_than_beats() for _ in messages] == messages


def test_an_order_is_answered_from_the_io_thread(scheduler: Scheduler, rank: Rank) -> None:
    scheduler.hear()
    scheduler.say(encode(Suspend(epoch=1, stop_at=5)))
    assert rank.heard.get(timeout=PATIENCE_S) == Suspend(epoch=1, stop_at=5)
    assert scheduler.hear_other_than_beats() == OVERSHOT


def test_nonsense_is_dropped_and_said(
    scheduler: Scheduler, rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler.hear()
    for frame in (b"", b"\xc1nonsense", encode(HELLO), b"x" * 2_000_000):
        scheduler.say(frame)
    scheduler.say(encode(Welcome(version=PROTOCOL_VERSION)))
    assert rank.heard.get(timeout=PATIENCE_S) == Welcome(version=PROTOCOL_VERSION)
    assert capsys.readouterr().err.count("dropped what the scheduler sent") == 4


def no_descriptor() -> Progress:
    raise OSError(24, "Too many open files")


def test_a_heartbeat_and_an_order_that_fail_end_nothing(
    scheduler: Scheduler, rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [scheduler.hear() for _ in range(2)] == [HELLO, BEAT]
    for _ in range(2):
        rank.beats.put(no_descriptor)
    rank.failures.put(RuntimeError("a bug"))
    scheduler.say(encode(Suspend(epoch=1, stop_at=5)))
    scheduler.say(encode(Suspend(epoch=1, stop_at=6)))
    assert scheduler.hear_other_than_beats() == OVERSHOT
    assert rank.heard.get(timeout=PATIENCE_S) == Suspend(epoch=1, stop_at=6)
    while not rank.beats.empty():
        assert scheduler.hear() == BEAT
    assert scheduler.hear() == BEAT
    said = capsys.readouterr().err
    assert said.count("could not make a heartbeat: OSError: [Errno 24] Too many open files") == 1
    assert said.count("could not obey the scheduler: RuntimeError: a bug") == 1


def test_a_closed_stderr_ends_nothing(
    scheduler: Scheduler, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scheduler.hear() == HELLO
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stderr", closed)
    scheduler.say(b"\xc1nonsense")
    scheduler.say(encode(Suspend(epoch=1, stop_at=5)))
    assert scheduler.hear_other_than_beats() == OVERSHOT


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whoever_has_something_to_say_hears_that_nobody_is_there_to_send_it(endpoint: str) -> None:
    rank = Rank(endpoint)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank.link, "_serve", lambda *sockets: 1 // 0)
        rank.link.start()
        rank.link._thread.join()
    with pytest.raises(EnvironmentUnusableError, match="has ended"):
        rank.link.send(OVERSHOT)
    rank.link.close()


def test_a_new_scheduler_is_greeted_and_hears_nothing_outdated(endpoint: str, rank: Rank) -> None:
    first = Scheduler(endpoint)
    assert first.hear() == HELLO
    first.close()
    rank.greeting = [HELLO, Overshot(epoch=7, boundary=7)]
    second = Scheduler(endpoint)
    try:
        # Whatever was on its way to the first one, the second hears how things stand before all else.
        assert second.hear() == HELLO
        assert second.hear() == Overshot(epoch=7, boundary=7)
    finally:
        second.close()


def test_a_new_scheduler_is_greeted_first_though_it_came_while_a_heartbeat_was_due(endpoint: str) -> None:
    clock, seconds = StallingClock(), list[Scheduler]()
    first, rank = Scheduler(endpoint), Rank(endpoint, clock)

    def another_scheduler() -> None:
        first.close()
        seconds.append(Scheduler(endpoint))
        seconds[0].wait_for_a_connection()
        came.set()

    came = threading.Event()
    rank.link.start()
    try:
        assert [first.hear(), first.hear()] == [HELLO, BEAT]
        clock.stall(another_scheduler)
        assert came.wait(PATIENCE_S)
        assert [seconds[0].hear(), seconds[0].hear()] == [HELLO, BEAT]
    finally:
        rank.link.close()
        for scheduler in (first, *seconds):
            scheduler.close()


def test_a_job_may_come_before_its_scheduler(endpoint: str, rank: Rank) -> None:
    late = Scheduler(endpoint)
    try:
        assert late.hear() == HELLO
    finally:
        late.close()


def test_the_last_words_are_sent_before_the_end(scheduler: Scheduler, endpoint: str) -> None:
    rank = Rank(endpoint)
    rank.link.start()
    assert scheduler.hear() == HELLO
    bye = Bye(epoch=1, boundary=2, step=3)
    rank.link.send(bye)
    rank.link.close()
    assert scheduler.hear_other_than_beats() == bye


def test_closing_does_not_wait_for_a_scheduler_that_is_not_there(endpoint: str) -> None:
    rank = Rank(endpoint)
    rank.link.start()
    rank.link.send(Bye(epoch=1, boundary=2, step=3))
    rank.link.close()
