"""A live scheduler, told everything that it can be told: it answers throughout, and loses nothing.

``GPUSLICE_BORDERS`` says how many messages at least; ``./x soak borders`` sends a hundred thousand.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from random import Random
from typing import get_args

import psutil
import pytest
import zmq

from gpuslice import verbs, wire
from gpuslice.client.client import Client
from gpuslice.daemon.replay import JournalReplay
from gpuslice.errors import RemoteProtocolError, UsageError
from gpuslice.sched_core.journal.journal import FILE
from gpuslice.wire import MAX_MESSAGE_BYTES

from ..patience import PATIENCE_MS, PATIENCE_S
from ..ranges import beyond, within
from .conftest import Shell
from .extremes import at_extremes, mutated, reports, requests

FUZZ_RANK = Path(__file__).with_name("fuzz_rank.py")
_AT_ONCE = 250
#: All requests and reports at all extremes are the first 5,870; after these they are drawn at random.
_MESSAGES = int(os.environ.get("GPUSLICE_BORDERS", "6000"))
#: Messages of one rank; then comes the next, because it may have talked its job to death.
_OF_ONE_RANK = 4_000
#: What would end the scheduler, submit more jobs, or keep the jobs that are to be talked to from its device.
_NOT_ASKED = (verbs.Down, verbs.SubmitArray, verbs.Pause, verbs.Drain, verbs.Reserve)
#: Of the scheduler's memory, once it has seen some of everything.
_MAY_GROW_BYTES = 48 << 20


def bodies(seed: int, job: str) -> Iterator[bytes]:
    """What a user asks; nothing that is really one more job or the end, but a few jobs at first."""
    for request in requests(job):
        yield from (body for body in at_extremes(request) if not isinstance(_read(body), _NOT_ASKED))
    random = Random(seed)
    while True:
        body = mutated(verbs.encode(random.choice(requests(job)))[1], random)
        if not isinstance(_read(body), (verbs.Submit, *_NOT_ASKED)):
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
        """Send ``count`` requests at once; what waits for a job's end is answered then, all others now."""
        at_once = 0
        for body in islice(self._bodies, count):
            self._socket.send_multipart([verbs.VERSION, body])
            at_once += not isinstance(_read(body), verbs.Wait | verbs.Admission)
        for frames in ([b""], [b"1"], [b"9", b""], [b"1", b"", b""]):
            self._socket.send_multipart(frames)
        self.sent += count
        mark = f"nobody-{self.sent}"
        self._socket.send_multipart(verbs.encode(verbs.Logs(job=mark)))
        answered = 0
        while mark not in getattr(answer := self._answer(), "error", ""):
            answered += not isinstance(answer, verbs.Ended)
        assert answered >= at_once + 4, f"{at_once + 4 - answered} of {count} requests were not answered"

    def _answer(self) -> verbs.Answer:
        assert self._socket.poll(PATIENCE_MS), f"no answer after {self.sent} requests"
        answer = verbs.decode_answer(self._socket.recv_multipart())
        if isinstance(answer, verbs.Accepted):
            self.accepted.append(answer.job)
        return answer

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


@contextmanager
def connected(shell: Shell, name: str) -> Iterator[zmq.Socket[bytes]]:
    """One's own end of the scheduler's socket ``name``."""
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"ipc://{shell.directory / name}")
        yield socket


def errors_about(socket: zmq.Socket[bytes], messages: Sequence[Sequence[bytes]]) -> list[str]:
    """Send all of ``messages``; the error that answers each, in that order."""
    for message in messages:
        socket.send_multipart(message)
    answers = []
    for _ in messages:
        assert socket.poll(PATIENCE_MS), f"{len(answers)} of {len(messages)} messages were answered"
        frames = socket.recv_multipart()
        answer = wire.decode_to_agent(frames[0]) if len(frames) == 1 else verbs.decode_answer(frames)
        assert isinstance(answer, wire.Rejected | verbs.Failed), answer
        answers.append(answer.error)
    return answers


def test_each_value_out_of_its_range_is_refused_by_name_and_changes_nothing(
    shell: Shell, tmp_path: Path
) -> None:
    shell.up()
    client = shell.client()
    bystander = shell.submit(tmp_path / "enough", name="bystander")
    while client.status().jobs[0].steps == 0:
        assert client.wait(bystander, 0.05) is None
    shell("suspend", bystander)
    while client.status().jobs[0].state != "suspended":
        assert client.wait(bystander, 0.05) is None
    events = list(client.events())
    messages = [*reports(bystander), *requests(bystander)]
    assert {type(one) for one in messages} == {*get_args(wire.FromAgent), *get_args(verbs.Request)}
    with connected(shell, "scheduler.sock") as ranks, connected(shell, "client.sock") as users:
        for message in messages:
            asked = isinstance(message, get_args(verbs.Request))
            socket, head = (users, [verbs.VERSION]) if asked else (ranks, [])
            wrong = list(beyond(message))  # some messages have no field
            told = errors_about(socket, [[*head, body] for _, body in wrong])
            for (field, _), error in zip(wrong, told, strict=True):
                assert error.startswith(("not a request: ", "not a message of ")), (message, field, error)
                assert field in error, (message, error)
            if not asked and not isinstance(message, wire.Hello):
                # Said by a stranger, what may be said is refused for that reason alone.
                for error in errors_about(socket, [[body] for body in within(message)]):
                    assert error == f"{type(message).__name__} of an unknown rank"
    assert list(client.events()) == events
    (tmp_path / "enough").touch()
    client.resume(bystander)
    ended = client.wait(bystander, PATIENCE_S)
    assert ended is not None
    assert ended.state == "succeeded"
    shell("down")


def let_go(client: Client, job: str) -> None:
    """Release ``job``, which somebody holds, unless it has ended since."""
    try:
        client.resume(job)
    except UsageError:
        assert client.wait(job, PATIENCE_S) is not None


def flood(shell: Shell, name: str) -> None:
    """One message of many frames, each as long as one may be; its answer."""
    with connected(shell, name) as socket:
        socket.send_multipart([bytes(MAX_MESSAGE_BYTES)] * 200, copy=False)
        assert socket.poll(PATIENCE_MS)
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


@pytest.mark.slow
def test_whatever_is_said_on_both_sockets_the_scheduler_answers_and_nothing_is_lost(
    shell: Shell, tmp_path: Path
) -> None:
    shell("up", "--devices", "null:1", "--quantum", "20ms", "--switch-share", "0", "--metrics-port", "0")
    client, daemon = shell.client(), psutil.Process(shell.pid)
    bystander = shell.submit(tmp_path / "enough", name="bystander")
    said, ranks, level = 0, list[str](), 0
    with User(shell, "rank-1") as user:
        while said + user.sent < _MESSAGES:
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
                    let_go(client, rank)
            said += sent_by(client, rank)
            assert ended.state in ("succeeded", "failed", "cancelled")
            level = level or daemon.memory_info().rss
    for name in ("client.sock", "scheduler.sock"):
        flood(shell, name)
        assert bystander in shell("ps")
    assert daemon.memory_info().rss - level < _MAY_GROW_BYTES
    (tmp_path / "enough").touch()
    ended = client.wait(bystander, PATIENCE_S)
    assert ended is not None
    assert ended.state == "succeeded"
    for job in user.accepted:
        found = next(one for one in client.jobs() if one.id == job)
        if found.begin_unix_s or found.after:
            client.cancel(job)
        elif found.held:
            let_go(client, job)
        assert client.wait(job, PATIENCE_S) is not None
    assert errors(shell) == []
    check_the_journal(shell, client)
    shell("down")
