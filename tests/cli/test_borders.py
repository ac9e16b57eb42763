"""A live scheduler, told everything that it can be told: it answers throughout, and loses nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import psutil
import pytest
import zmq

from gpuslice import verbs
from gpuslice.client.client import Client
from gpuslice.daemon.replay import JournalReplay
from gpuslice.errors import RemoteProtocolError
from gpuslice.sched_core.journal.journal import FILE
from gpuslice.wire import MAX_MESSAGE_BYTES

from .conftest import DEADLINE_S, Shell
from .extremes import at_extremes, mutated, requests

FUZZ_RANK = Path(__file__).with_name("fuzz_rank.py")
_AT_ONCE = 50
#: Messages of one rank; then comes the next, because it may have talked its job to death.
_OF_ONE_RANK = 2_000
#: Of the scheduler's memory, once it has seen some of everything.
_MAY_GROW_BYTES = 48 << 20


def bodies(seed: int, job: str) -> Iterator[bytes]:
    """What a user asks; nothing that is really one more job or the end, but a few jobs at first."""
    for request in requests(job):
        yield from (body for body in at_extremes(request) if not isinstance(_read(body), verbs.Down))
    random = Random(seed)
    while True:
        body = mutated(verbs.encode(random.choice(requests(job)))[1], random)
        if not isinstance(_read(body), verbs.Submit | verbs.Down):
            yield body


def _read(body: bytes) -> verbs.Request | None:
    try:
        return verbs.decode_request([verbs.VERSION, body])
    except RemoteProtocolError:
        return None


class User:
    """Asks the user socket, and reads the answers."""

    def __init__(self, shell: Shell, job: str) -> None:
        self.sent = 0
        self.accepted: list[str] = []
        self._bodies = bodies(7, job)
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{shell.directory / 'client.sock'}")

    def ask(self, count: int) -> None:
        """Send ``count`` requests; what waits for a job's end is answered then, all others are at once."""
        for body in islice(self._bodies, count):
            self._socket.send_multipart([verbs.VERSION, body])
            self.sent += 1
            if not isinstance(_read(body), verbs.Wait | verbs.Admission):
                self._answer()
        for frames in ([], [b"1"], [b"9", b""], [b"1", b"", b""]):
            self._socket.send_multipart(frames or [b""])
            self._answer()

    def _answer(self) -> None:
        while True:
            assert self._socket.poll(DEADLINE_S * 1e3), f"no answer after {self.sent} requests"
            answer = verbs.decode_answer(self._socket.recv_multipart())
            if isinstance(answer, verbs.Accepted):
                self.accepted.append(answer.job)
            if not isinstance(answer, verbs.Ended | verbs.Done):
                return
            if isinstance(answer, verbs.Done):
                return

    def __enter__(self) -> User:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def sent_by(client: Client, job: str) -> int:
    """How many messages a rank has sent that the scheduler has dealt with."""
    lines = client.read_log(job).split()
    return int(lines[-1]) if lines else 0


def errors(shell: Shell) -> list[str]:
    """What the scheduler's log says of errors that nobody foresaw."""
    lines = [
        line for log in shell.directory.glob("scheduler.jsonl*") for line in log.read_text().splitlines()
    ]
    assert lines
    return [line for line in lines if '"level":"error"' in line or '"traceback"' in line]


def flood(shell: Shell, name: str) -> None:
    """One message of many frames, each as long as one may be; its answer."""
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"ipc://{shell.directory / name}")
        socket.send_multipart([bytes(MAX_MESSAGE_BYTES)] * 200, copy=False)
        assert socket.poll(DEADLINE_S * 1e3)
        assert b"too many frames" in socket.recv_multipart()[-1]


def check_the_journal(shell: Shell, client: Client) -> None:
    """Its replay comes to what the scheduler says."""
    states = {job.id: job.state for job in client.jobs()}
    with JournalReplay(shell.directory / FILE) as replay:
        for _ in replay.advance():
            pass
        replay.core.check()
        assert {job.id: job.state.value for job in replay.core.jobs.values()} == states
        assert replay.left_out == {}


@pytest.mark.parametrize(
    "count", [pytest.param(6_000, id="quick"), pytest.param(120_000, id="all", marks=pytest.mark.slow)]
)
def test_whatever_is_said_on_both_sockets_the_scheduler_answers_and_nothing_is_lost(
    shell: Shell, tmp_path: Path, count: int
) -> None:
    shell("up", "--devices", "null:1", "--quantum", "20ms", "--switch-share", "0", "--metrics-port", "0")
    client, daemon = shell.client(), psutil.Process(shell.pid)
    bystander = shell.submit(tmp_path / "enough", name="bystander")
    said, ranks, level = 0, list[str](), 0
    with User(shell, "rank-1") as user:
        while said + user.sent < count:
            rank = f"rank-{len(ranks) + 1}"
            words = ["--", sys.executable, str(FUZZ_RANK), str(len(ranks)), str(_OF_ONE_RANK)]
            ranks.append(client.submit(words, name=rank, max_restarts=0))
            while (ended := client.wait(rank, 0.0)) is None:
                user.ask(_AT_ONCE)
                known = {job.id: job for job in client.jobs()}
                assert known[bystander].state in (
                    "queued",
                    "starting",
                    "running",
                    "suspending",
                    "suspended",
                    "resuming",
                )
                assert set(user.accepted) | set(ranks) <= set(known)
                if known[rank].held:
                    client.resume(rank)
            said += sent_by(client, rank)
            assert ended.state in ("succeeded", "failed", "cancelled")
            level = level or daemon.memory_info().rss
    for name in ("client.sock", "scheduler.sock"):
        flood(shell, name)
    assert daemon.memory_info().rss - level < _MAY_GROW_BYTES
    (tmp_path / "enough").touch()
    ended = client.wait(bystander, DEADLINE_S)
    assert ended is not None
    assert ended.state == "succeeded"
    for job in user.accepted:
        assert client.wait(job, DEADLINE_S) is not None
    assert errors(shell) == []
    check_the_journal(shell, client)
    shell("down")
