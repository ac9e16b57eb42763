"""The newest heartbeats, in a small file beside a journal that does not have them yet.

The journal writes heartbeats together with the next other event. This file keeps what people have been shown
until then, so that no count of steps goes back if the scheduler is killed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from gpuslice.files import replace_file
from gpuslice.sched_core.lifecycle.events import Event, Reported, decode

from .head import checksum

_SUM_BYTES = len(checksum(b""))
_encoder = msgspec.msgpack.Encoder()


class _PutOff(msgspec.Struct, frozen=True):
    """Heartbeats with their times, and the running checksum of the event that they follow."""

    chain: bytes
    beats: list[tuple[float, bytes]]


def path_of(journal: Path) -> Path:
    """Return the path of the heartbeats of ``journal``."""
    return journal.with_suffix(".beats")


def save(path: Path, chain: bytes, beats: Iterable[tuple[float, Reported]]) -> None:
    """Write ``beats``, which follow the event with the checksum ``chain``, instead of earlier ones."""
    data = _encoder.encode(_PutOff(chain, [(at_s, _encoder.encode(beat)) for at_s, beat in beats]))
    replace_file(path, checksum(data) + data)


def load(path: Path, chain: bytes) -> list[tuple[float, Reported]]:
    """Return the heartbeats that follow the event with the checksum ``chain``, oldest first.

    Return none if the file has those of another moment or is damaged: heartbeats may be missing.
    """
    try:
        written = path.read_bytes()
        data = written[_SUM_BYTES:]
        if checksum(data) != written[:_SUM_BYTES]:
            return []
        found = msgspec.msgpack.decode(data, type=_PutOff)
        events: list[tuple[float, Event]] = [(at_s, decode(beat)) for at_s, beat in found.beats]
    except (FileNotFoundError, msgspec.MsgspecError):
        return []
    return (
        [(at_s, event) for at_s, event in events if isinstance(event, Reported)]
        if found.chain == chain
        else []
    )
