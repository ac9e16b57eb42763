"""The edge of the control socket: every message round-trips, everything else is refused by type."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice import wire
from gpuslice.errors import LocalProtocolError, RemoteProtocolError

from ..ranges import beyond, within

FROM_AGENT = [
    wire.Hello(version=1, job="a", rank=0, world_size=2, pid=7),
    wire.Progress(epoch=1, boundary=12, step=11),
    wire.Profiled(epoch=1, tensors=3, nbytes=1 << 40, largest_bytes=1 << 30),
    wire.Suspended(epoch=1, boundary=12, step=11, nbytes=1 << 40, stages_s={"copy_out": 0.25}),
    wire.Resumed(epoch=2, boundary=12, stages_s={"copy_in": 0.5}),
    wire.Overshot(epoch=1, boundary=14),
    wire.Refused(epoch=1, boundary=3, running=True, error="e", remedy="r", retryable=False),
    wire.Withdrawn(epoch=2),
    wire.Bye(epoch=2, boundary=40, step=39),
]
TO_AGENT = [
    wire.Welcome(version=1),
    wire.Suspend(epoch=1, stop_at=13),
    wire.Resume(epoch=2, device="cuda:1"),
    wire.Resume(epoch=2, device="cuda:1", width=3, world=2),
    wire.Dismiss(epoch=2),
    wire.Rejected(error="e", remedy="r"),
    wire.Replaced(),
    wire.Queued(behind=7),
    wire.Beside(behind=7),
    wire.Withdraw(epoch=3),
]


@pytest.mark.parametrize("message", FROM_AGENT, ids=lambda message: type(message).__name__)
def test_what_an_agent_says_arrives_unchanged(message: wire.FromAgent) -> None:
    assert wire.decode_from_agent(wire.encode(message)) == message


@pytest.mark.parametrize("message", TO_AGENT, ids=lambda message: type(message).__name__)
def test_what_the_scheduler_says_arrives_unchanged(message: wire.ToAgent) -> None:
    assert wire.decode_to_agent(wire.encode(message)) == message


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "suspend", "epoch": 1},
        {"type": "suspend", "epoch": 1, "stop_at": 2, "hurry": True},
        {"type": "suspend", "epoch": "1", "stop_at": 2},
        {"type": "hello"},
        {"type": "unheard-of"},
        {"epoch": 1, "stop_at": 2},
        [1, 2],
        None,
    ],
)
def test_what_is_not_a_message_is_refused(fields: object) -> None:
    with pytest.raises(RemoteProtocolError):
        wire.decode_to_agent(msgspec.msgpack.encode(fields))


def test_directions_do_not_mix() -> None:
    with pytest.raises(RemoteProtocolError):
        wire.decode_to_agent(wire.encode(FROM_AGENT[0]))
    with pytest.raises(RemoteProtocolError):
        wire.decode_from_agent(wire.encode(TO_AGENT[0]))


@given(st.binary(max_size=200))
def test_garbage_is_refused_by_type(frame: bytes) -> None:
    for decode in (wire.decode_from_agent, wire.decode_to_agent):
        try:
            decode(frame)
        except RemoteProtocolError:
            continue


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        wire.decode_to_agent(b"\x91" * 100_000)


def test_oversize_is_refused_on_both_ends() -> None:
    with pytest.raises(RemoteProtocolError, match="exceeds"):
        wire.decode_to_agent(bytes(wire.MAX_MESSAGE_BYTES + 1))
    with pytest.raises(LocalProtocolError, match="Rejected"):
        wire.encode(wire.Rejected(error="e" * wire.MAX_MESSAGE_BYTES, remedy=""))


@pytest.mark.parametrize("message", [*FROM_AGENT, *TO_AGENT], ids=lambda message: type(message).__name__)
def test_each_value_is_within_its_range(message: wire.FromAgent | wire.ToAgent) -> None:
    decode = wire.decode_from_agent if message in FROM_AGENT else wire.decode_to_agent
    for body in within(message):
        decode(body)
    for field, body in beyond(message):
        with pytest.raises(RemoteProtocolError) as error:
            decode(body)
        assert field in error.value.message.partition(": ")[2], (error.value.message, body[:200])


def test_each_kind_of_message_is_tested() -> None:
    assert {type(message) for message in FROM_AGENT} == set(get_args(wire.FromAgent))
    assert {type(message) for message in TO_AGENT} == set(get_args(wire.ToAgent))


def test_text_that_is_not_utf8_is_refused_by_type() -> None:
    frame = wire.encode(FROM_AGENT[6]).replace(b"\xa1e", b"\xa1\xff")
    assert b"\xff" in frame
    with pytest.raises(RemoteProtocolError, match="utf-8"):
        wire.decode_from_agent(frame)
