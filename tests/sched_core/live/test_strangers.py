"""Whatever is said to the scheduler's socket, and by whom: it answers, and disturbs nobody."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from gpuslice import wire
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.live.scheduler import Scheduler
from gpuslice.sched_core.policies.rr import RoundRobin
from gpuslice.types import DeviceName

from .bench import Bench


class Stranger:
    """Somebody who connects and says things."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(bench.scheduler.local.endpoint)

    def ask(self, *frames: bytes) -> wire.ToAgent:
        self.socket.send_multipart(frames)
        self.bench.run(lambda: bool(self.socket.poll(100)))  # nothing wakes it when the answer is here
        return wire.decode_to_agent(self.socket.recv())

    def close(self) -> None:
        self.context.destroy()


@pytest.fixture
def stranger(open_bench: Callable[[int], Bench]) -> Iterator[Stranger]:
    found = Stranger(open_bench(1))
    yield found
    found.close()


HELLO = wire.Hello(version=wire.PROTOCOL_VERSION, job="a", rank=0, world_size=1, pid=1)


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ((b"\xff\xfegarbage",), "not a message"),
        ((b"",), "not a message"),
        ((b"a", b"b"), "2 frames"),
        ((b"a",) * 3, "too many frames"),
        ((bytes(1 << 19),) * 30, "too many frames or bytes"),
        ((wire.encode(wire.Welcome(version=1)),), "not a message"),
        ((wire.encode(wire.Progress(epoch=1, boundary=1, step=1)),), "unknown rank"),
        ((wire.encode(wire.Hello(version=99, job="a", rank=0, world_size=1, pid=1)),), "version 99"),
        ((wire.encode(HELLO),), "no job 'a'"),
    ],
)
def test_what_cannot_be_accepted_is_answered_and_dropped(
    stranger: Stranger, frames: tuple[bytes, ...], why: str
) -> None:
    answers = [stranger.ask(*frames)]
    while isinstance(answers[-1], wire.Welcome):
        answers.append(wire.decode_to_agent(stranger.socket.recv()))
    assert isinstance(answers[-1], wire.Rejected)
    assert why in answers[-1].error
    assert stranger.bench.story == []


def test_ten_thousand_garbage_frames_and_an_oversize_one_disturb_nobody(
    stranger: Stranger, enough: Path
) -> None:
    bench = stranger.bench
    bench.submit("a", enough)
    bench.wait_for("a", JobState.RUNNING)

    def may_send() -> bool:
        return bool(stranger.socket.poll(0, zmq.POLLOUT))

    for number in range(10_000):
        bench.run(may_send)
        stranger.socket.send(b"%d" % number, flags=zmq.NOBLOCK)
    bench.run(may_send)
    stranger.socket.send(bytes(wire.MAX_MESSAGE_BYTES + 1), flags=zmq.NOBLOCK)
    enough.touch()
    assert bench.finish() == {"a": JobState.SUCCEEDED}


def test_the_socket_is_private_and_has_one_owner(open_bench: Callable[[int], Bench], directory: Path) -> None:
    bench = open_bench(1)
    for path in (directory, directory / "scheduler.sock", directory / "scheduler.pid"):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077
    with pytest.raises(EnvironmentUnusableError, match=f"pid {os.getpid()}"):
        open_bench(1)
    bench.scheduler.close()
    open_bench(1)


@pytest.mark.parametrize("fault", ["public", "long"])
def test_an_unsuitable_directory_is_refused(tmp_path: Path, fault: str) -> None:
    directory = tmp_path / ("d" * 120 if fault == "long" else "d")
    if fault == "public":
        directory.mkdir(mode=0o755)
    core = Core([DeviceName("null", 0)], RoundRobin())
    with pytest.raises(EnvironmentUnusableError):
        Scheduler(core, directory)
