"""Messages as nobody should send them: each field of each kind at its extremes, and mutated frames."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec

from gpuslice import verbs, wire

_NOT_UTF8 = "not-utf8"
_NESTED = "nested"

INTEGERS = (
    -(2**63),
    -(2**31),
    -5,
    -1,
    0,
    1,
    2,
    2**31 - 1,
    2**31,
    2**53,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
FLOATS = (float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, 1e-6, 1e6, 1e9, 2.52e6, 1e308)
STRINGS = (
    "",
    "a",
    "\0",
    "a\0b",
    "=",
    "A=B",
    "\n",
    "../x",
    "a" * 64,
    "a" * 65,
    "a" * 70_000,
    "é🙂",
    _NOT_UTF8,
)
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    b"\xff",
    [],
    {},
    ["\0"],
    ["true", "\0"],
    {"A=B": "c"},
    {"A": "\0"},
)
MORE: tuple[Any, ...] = (
    {"a_s": -1.0},
    {"a_s": float("nan")},
    {f"{n}_s": 1.0 for n in range(99)},
    ["a"] * 20_000,
)
EXTREMES: tuple[Any, ...] = (*INTEGERS, *FLOATS, *STRINGS, *OTHERS, *MORE)


def reports(job: str, epoch: int = 1) -> list[wire.FromAgent]:
    """What a rank may say, one of each kind."""
    stages_s = {"copy_out_s": 0.25}
    return [
        wire.Hello(version=wire.PROTOCOL_VERSION, job=job, rank=0, world_size=1, pid=1, epoch=epoch),
        wire.Progress(epoch=epoch, boundary=12, step=11),
        wire.Profiled(epoch=epoch, tensors=3, nbytes=1 << 40, largest_bytes=1 << 30),
        wire.Suspended(epoch=epoch, boundary=12, step=11, nbytes=1 << 40, stages_s=stages_s),
        wire.Resumed(epoch=epoch, boundary=12, stages_s=stages_s),
        wire.Overshot(epoch=epoch, boundary=14),
        wire.Refused(epoch=epoch, boundary=3, running=True, error="e", remedy="r", retryable=False),
        wire.Bye(epoch=epoch, boundary=40, step=39),
        wire.Withdrawn(epoch=epoch),
    ]


def requests(job: str) -> list[verbs.Request]:
    """What a user may ask, one of each kind."""
    return [
        verbs.Submit(stem="x", argv=("true",), directory="/", environ={"A": "b"}, tenant="t"),
        verbs.SubmitArray(stem="y", argv=("true",), directory="/", environ={"A": "b"}, array="0-2%1"),
        verbs.Status(),
        verbs.Wait(job=job),
        verbs.Admission(job=job),
        verbs.Cancel(job="nobody"),
        verbs.Suspend(job=job),
        verbs.Resume(job=job),
        verbs.Requeue(job=job, fresh=True),
        verbs.Adjust(job=job, weight=2.0, priority=1, time_limit_s=1e6),
        verbs.Set(settings=("grace=5s",)),
        verbs.Migrate(job=job, devices=("null:0",)),
        verbs.Weight(job=job, weight=2.0),
        verbs.Pause(devices=("null:0",), for_s=1.0),
        verbs.Unpause(devices=("null:0",)),
        verbs.Drain(devices=("null:0",)),
        verbs.Undrain(devices=("null:0",)),
        verbs.Reserve(devices=("null:0",), begin_in_s=1.0, end_in_s=2.0, user="t"),
        verbs.Unreserve(reservation="r1"),
        verbs.Logs(job=job),
        verbs.ReadLog(job=job),
        verbs.Events(),
        verbs.Down(),
        verbs.CallOff(),
    ]


def at_extremes(message: wire.FromAgent | verbs.Request) -> Iterator[bytes]:
    """``message`` with each of its fields at each extreme, left out, and one that it has not."""
    fields = _written(message)
    for name in fields:
        for value in EXTREMES:
            yield encoded({**fields, name: value})
        yield encoded({other: value for other, value in fields.items() if other != name})
    yield encoded({**fields, "more": 1})
    yield encoded({**fields, "more": _NESTED})


def at_an_extreme(message: wire.FromAgent, random: Random) -> bytes:
    """``message`` with one of its fields at one extreme."""
    fields = _written(message)
    return encoded({**fields, random.choice(list(fields)): random.choice(EXTREMES)})


def _written(message: wire.FromAgent | verbs.Request) -> dict[str, Any]:
    """Every field of ``message``, those that are left out where they have their defaults, too."""
    defaults = {field.encode_name: getattr(message, field.name) for field in msgspec.structs.fields(message)}
    return {**defaults, **msgspec.to_builtins(message)}


def encoded(value: Any) -> bytes:
    """As msgpack, with what no encoder writes where that is wanted."""
    frame = msgspec.msgpack.encode(value)
    frame = frame.replace(_NOT_UTF8.encode(), b"\xff\xfe" * (len(_NOT_UTF8) // 2))
    return frame.replace(msgspec.msgpack.encode(_NESTED), b"\x91" * 100_000 + b"\xc0")


def mutated(frame: bytes, random: Random) -> bytes:
    """``frame`` with bits turned, cut off, repeated, or in pieces."""
    changed = bytearray(frame)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(changed) + 1)
        match random.randrange(4):
            case 0 if at < len(changed):
                changed[at] ^= 1 << random.randrange(8)
            case 1 if at < len(changed):
                changed[at] = random.choice(b"\x00\x7f\x80\xa0\xc0\xc1\xcb\xcf\xd3\xdb\xdd\xdf\xff")
            case 2:
                del changed[at : at + random.randint(1, 8)]
            case _:
                changed[at:at] = random.randbytes(random.randint(1, 8))
    return bytes(changed)


def varied(message: wire.FromAgent, random: Random) -> bytes:
    """``message`` with numbers that it may have: what it says can be believed."""
    fields = msgspec.to_builtins(message)
    for name in ("boundary", "step", "nbytes"):
        if name in fields and random.random() < 0.5:
            fields[name] = random.choice((0, 1, 2, 20, 2**31, 2**52, 2**53 - 1, 2**53))
    return encoded(fields)
