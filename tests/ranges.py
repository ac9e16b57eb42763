"""What each field of each message may be, written down once more: values just within its range, and just not.

It is stated here by hand, so that a range that somebody loosens in ``gpuslice.types`` is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, nan, nextafter
from typing import Any

import msgspec

#: Stands for bytes that are no UTF-8.
NOT_UTF8 = "not-utf8"


@dataclass(frozen=True)
class Range:
    """Values that a field may have, and values that it may not."""

    within: tuple[Any, ...]
    beyond: tuple[Any, ...]


COUNT = Range((0, 2**53), (-(2**63), -1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, None, "1", 0.5))
OPTIONAL_COUNT = Range((None, *COUNT.within), tuple(value for value in COUNT.beyond if value is not None))
STOP_AT = Range((0, 2**62), (-1, 2**62 + 1, 2**63, None))
BYTES = Range((0, 2**60), (-5, -1, 2**60 + 1, 2**64 - 1, None))
RANK = Range((0, 2**16 - 1), (-1, 2**16, 2**64 - 1, None))
RANKS = Range((1, 2**16), (-1, 0, 2**16 + 1, 2**31, None))
OPTIONAL_RANKS = Range((0, 2**16), (-1, 2**16 + 1, 2**31, None))
PID = Range((0, 2**31 - 1), (-1, 2**31, None))
SECONDS = Range((0.0, 0, 1e9), (-5e-324, -1.0, -inf, nextafter(1e9, inf), inf, nan, "1"))
PRIORITY = Range((-(10**6), 0, 10**6), (-(10**6) - 1, 10**6 + 1, 0.5, None, "1"))
UNIX_TIME = Range((0.0, 0, 2e11), (-1.0, nextafter(2e11, inf), inf, nan, None, "1"))
OPTIONAL_SECONDS = Range((None, *SECONDS.within), SECONDS.beyond)
LOSS = Range((None, -1e300, 1e300), (-inf, -1.1e300, 1.1e300, inf, nan, "1"))
WEIGHT = Range((1e-6, 1, 1e6), (-1.0, 0.0, nextafter(1e-6, 0.0), nextafter(1e6, inf), inf, nan, None))
FLAG = Range((True, False), (0, None, "true"))
NAME = Range(
    ("a", "a" * 64, "0-_."), ("", "a" * 65, "a/b", "..", "-a", "a\0", "a\n", "\na", "é", NOT_UTF8, 1, None)
)
OPTIONAL_NAME = Range((None, *NAME.within), tuple(value for value in NAME.beyond if value is not None))
DEPENDENCIES = Range(
    ((), ("a", "a:ok", "a:any", "a" * 64 + ":failed")),
    (("a:",), ("a:never",), ("a b",), ("a:ok:ok",), (1,), "a", {"a": "ok"}),
)
WORDS = Range(
    ((), ("", "=\n", "é🙂")), (("\0",), ("a", "b\0c"), ("a", NOT_UTF8), (None,), ("a", 1), "a", {"a": "b"})
)
WORD = Range(("", "=\n", "é🙂"), ("a\0", NOT_UTF8, 1, None))
PATH = Range(("", "/" * 4096), ("/\0", "/" * 4097, NOT_UTF8, None))
VARIABLES = Range(({}, {"": "=\n", "é": "🙂"}), ({"A=B": "c"}, {"A\0": "c"}, {"A": "\0"}, {"A": 1}, ["A"]))
OPTIONAL_VARIABLES = Range((None, *VARIABLES.within), VARIABLES.beyond)
LABEL = Range(("", "a" * 64, "é 🙂"), ("a" * 65, "a=b", "\0", "\n", "\x1f", "\x7f", NOT_UTF8, 1, None))
LABELS = Range(((), ("null:0", "a" * 64)), (("a" * 65,), ("a", "b=c"), ("a\0",), (1,), "a"))
TEXT = Range(("", "\0\n=", "é" * 2**16), ("a" * (2**16 + 1), NOT_UTF8, 1, None))
STAGES = Range(
    ({}, {f"{number}_s": 1e9 for number in range(32)}),
    (
        {f"{number}_s": 1.0 for number in range(33)},
        {"a": -1.0},
        {"a": nan},
        {"a": inf},
        {"a": 1.1e9},
        {"a\0": 1.0},
        {"a" * 65: 1.0},
        {"a": "1"},
        ["a"],
    ),
)
ROUTE = Range((None, "auto", "tensor", "vmm", "driver"), ("teleport", "", 1))
CHOICE = Range(("leave", "kill"), ("explode", "", None, 1))

OPTIONAL_WEIGHT = Range((None, *WEIGHT.within), tuple(value for value in WEIGHT.beyond if value is not None))
OPTIONAL_PRIORITY = Range(
    (None, *PRIORITY.within), tuple(value for value in PRIORITY.beyond if value is not None)
)

_BY_NAME = {
    "after": COUNT,
    "array": WORD,
    "at_once": COUNT,
    "fold": FLAG,
    "fresh": FLAG,
    "grid": VARIABLES,
    "begin_unix_s": UNIX_TIME,
    "hold": FLAG,
    "app": LABEL,
    "attempt": OPTIONAL_COUNT,
    "argv": WORDS,
    "bound": TEXT,
    "boundary": COUNT,
    "boundary_timeout_s": SECONDS,
    "checkpoint_every": OPTIONAL_COUNT,
    "deadline_s": SECONDS,
    "device": LABEL,
    "devices": RANKS,
    "directory": PATH,
    "drain": FLAG,
    "ending": FLAG,
    "for_restart": FLAG,
    "env": VARIABLES,
    "environ": OPTIONAL_VARIABLES,
    "epoch": COUNT,
    "err": FLAG,
    "error": TEXT,
    "expected_s": SECONDS,
    "grace_s": OPTIONAL_SECONDS,
    "wait_for_node_s": OPTIONAL_SECONDS,
    "guaranteed": FLAG,
    "job": NAME,
    "keep": FLAG,
    "largest_bytes": BYTES,
    "peak_bytes": BYTES,
    "loss": LOSS,
    "max_restarts": COUNT,
    "max_steps": COUNT,
    "device_memory_bytes": BYTES,
    "most_devices": OPTIONAL_RANKS,
    "most_device_memory_bytes": BYTES,
    "name": OPTIONAL_NAME,
    "nbytes": BYTES,
    "notify": WORD,
    "offset": BYTES,
    "on_end": WORD,
    "on_boundary_timeout": CHOICE,
    "parked": FLAG,
    "behind": PID,
    "replaces": PID,
    "pid": PID,
    "priority": PRIORITY,
    "rank": RANK,
    "reason": TEXT,
    "reservation": NAME,
    "begin_in_s": SECONDS,
    "end_in_s": SECONDS,
    "for_s": OPTIONAL_SECONDS,
    "user": LABEL,
    "remedy": TEXT,
    "retryable": FLAG,
    "route": LABEL,
    "relaunch": FLAG,
    "restartable": FLAG,
    "restartable_later": FLAG,
    "running": FLAG,
    "samples": COUNT,
    "settings": WORDS,
    "saved": COUNT,
    "stages_s": STAGES,
    "stem": NAME,
    "step": COUNT,
    "steps": COUNT,
    "stop_at": STOP_AT,
    "stuck": TEXT,
    "tenant": LABEL,
    "tensors": COUNT,
    "time_limit_s": SECONDS,
    "trial": FLAG,
    "trial_batches": COUNT,
    "unleased": TEXT,
    "version": COUNT,
    "weight": WEIGHT,
    "went_on_from": COUNT,
    "width": OPTIONAL_RANKS,
    "world": COUNT,
    "world_size": RANKS,
}
_OF_KIND = {
    **{(kind, "devices"): LABELS for kind in ("migrate", "pause", "unpause", "drain", "undrain", "reserve")},
    ("adjust", "weight"): OPTIONAL_WEIGHT,
    ("adjust", "priority"): OPTIONAL_PRIORITY,
    ("adjust", "time_limit_s"): OPTIONAL_SECONDS,
    ("submit", "route"): ROUTE,
    ("submit_array", "route"): ROUTE,
    ("submit", "after"): DEPENDENCIES,
    ("submit_array", "after"): DEPENDENCIES,
}


def within(message: msgspec.Struct) -> Iterator[bytes]:
    """``message`` with each of its fields at the ends of its range."""
    for _, body in _changed(message, "within"):
        yield body


def beyond(message: msgspec.Struct) -> Iterator[tuple[str, bytes]]:
    """``message`` with each of its fields out of its range, and what an error about it has to name."""
    return _changed(message, "beyond")


def _changed(message: msgspec.Struct, side: str) -> Iterator[tuple[str, bytes]]:
    written: dict[str, Any] = msgspec.to_builtins(message)
    kind = written["type"]
    for field in msgspec.structs.fields(message):
        name = field.encode_name
        values = _OF_KIND.get((kind, name)) or _BY_NAME[name]
        for value in getattr(values, side):
            body = msgspec.msgpack.encode({**written, name: value})
            # Where the text ends, not which field it is, is all that a decoder of UTF-8 knows.
            told = "utf-8" if _holds(value, NOT_UTF8) else f"`$.{name}"
            yield told, body.replace(NOT_UTF8.encode(), b"\xff\xfe" * (len(NOT_UTF8) // 2))


def _holds(value: Any, text: str) -> bool:
    return value == text or (isinstance(value, tuple) and text in value)
