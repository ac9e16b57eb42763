"""Requests and answers: there and back, and nothing else."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from gpuslice import verbs
from gpuslice.client.client import _expect
from gpuslice.errors import GpusliceError, RemoteProtocolError, UnforeseenError, UsageError
from gpuslice.wire import MAX_MESSAGE_BYTES

from ..ranges import beyond, within

SUBMIT = verbs.Submit(stem="a", argv=("true",), directory="/", environ={"A": "b"})


ARRAY = verbs.SubmitArray(
    stem="a", argv=("true", "{}"), directory="/", environ={"A": "b"}, grid={"lr": "1,2"}, at_once=1
)
REQUESTS = [
    SUBMIT,
    ARRAY,
    verbs.Status(after=1, fold=True),
    verbs.Wait(job="a"),
    verbs.Admission(job="a"),
    verbs.Cancel(job="a"),
    verbs.Suspend(job="a"),
    verbs.Resume(job="a"),
    verbs.Requeue(job="a", fresh=True),
    verbs.Adjust(job="a", weight=2.0, priority=-1, time_limit_s=9.0),
    verbs.Set(settings=("policy=las", "quantum=2s")),
    verbs.Migrate(job="a", devices=("cpu:1",)),
    verbs.Weight(job="a", weight=2.0),
    verbs.Pause(devices=("cpu:1",), for_s=7200.0),
    verbs.Unpause(devices=("cpu:1",)),
    verbs.Drain(devices=("b",)),
    verbs.Undrain(),
    verbs.Reserve(devices=("cpu:1",), begin_in_s=0.0, end_in_s=3600.0, user="t"),
    verbs.Unreserve(reservation="r1"),
    verbs.Logs(job="a"),
    verbs.ReadLog(job="a", err=True, offset=7),
    verbs.Events(after=3),
    verbs.Down(drain=True),
    verbs.CallOff(),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_requests_come_back(request_: verbs.Request) -> None:
    assert verbs.decode_request(verbs.encode(request_)) == request_


@pytest.mark.parametrize(
    "answer",
    [
        verbs.Accepted(job="a"),
        verbs.AcceptedArray(array="a", jobs=("a-0",)),
        verbs.Failed(error="e", remedy="r", exit_code=2),
        verbs.Done(),
    ],
)
def test_answers_come_back(answer: verbs.Answer) -> None:
    assert verbs.decode_answer(verbs.encode(answer)) == answer


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([], "0 frames"),
        ([b"1"], "1 frames"),
        ([b"2", b""], "version b'2'"),
        ([b"1", b""], "not a request"),
        ([b"1", b"\xff\xfe"], "not a request"),
        ([b"1", msgspec.msgpack.encode({"type": "format", "job": "a"})], "not a request"),
        ([b"1", msgspec.msgpack.encode({"type": "wait"})], "missing required field `job`"),
        ([b"1", msgspec.msgpack.encode({"type": "wait", "job": "a", "more": 1})], "unknown field `more`"),
        ([b"1", verbs.encode(verbs.Done())[1]], "not a request"),
        ([b"1", bytes(MAX_MESSAGE_BYTES + 1)], "exceeds"),
        ([b"1", verbs.encode(verbs.Wait(job="a"))[1].replace(b"\xa1a", b"\xa1\xff")], "utf-8"),
        ([b"1", msgspec.msgpack.encode({"type": "events", "after": 2**63})], "after"),
        ([b"1", msgspec.msgpack.encode({"type": "weight", "job": "a", "weight": float("nan")})], "weight"),
    ],
)
def test_anything_else_is_refused(frames: list[bytes], why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        verbs.decode_request(frames)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_each_value_is_within_its_range(request_: verbs.Request) -> None:
    for body in within(request_):
        verbs.decode_request([verbs.VERSION, body])
    for field, body in beyond(request_):
        with pytest.raises(RemoteProtocolError) as error:
            verbs.decode_request([verbs.VERSION, body])
        assert field in error.value.message.partition(": ")[2], (error.value.message, body[:200])


def test_each_kind_of_request_is_tested() -> None:
    assert {type(request) for request in REQUESTS} == set(get_args(verbs.Request))


@pytest.mark.parametrize(("code", "kind"), [(1, UnforeseenError), (2, UsageError), (9, RemoteProtocolError)])
def test_a_failure_is_raised_as_what_it_is(code: int, kind: type[GpusliceError]) -> None:
    with pytest.raises(kind, match="no luck"):
        _expect(verbs.Failed(error="no luck", remedy="wait", exit_code=code), verbs.Done)
