"""A sender and a receiver in this process, without Ray, and what they send."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuslice.nodes.messages import Held, Missing, decode, encode
from gpuslice.nodes.receiver import Receiver
from gpuslice.nodes.sender import Sender

from .synthetic import storages

JOB = "mnist"
#: The states of a job of one rank, and of two that have nothing or most in common.
GANGS = {
    "one": [storages(0)],
    "different": [storages(0), storages(1)],
    "alike": [storages(0), [*storages(0)[:1], *storages(1)[1:]]],
}
gangs = pytest.mark.parametrize("contents", GANGS.values(), ids=GANGS)
#: So that pieces of 4 MiB go one by one, and small ones together.
PORTION_BYTES = 1 << 20


def a_sender(source: Path, spill: Path | None = None) -> tuple[Sender, Held]:
    flags = {"ramdisk_dir": str(source)} | ({} if spill is None else {"spill_dir": str(spill)})
    sender = Sender(flags)
    return sender, decode(sender.begin(JOB), Held)


def a_receiver(target: Path, **flags: str) -> Receiver:
    return Receiver({"ramdisk_dir": str(target), **flags}, portion_bytes=PORTION_BYTES)


def portions(sender: Sender, held: Held, receiver: Receiver) -> Iterator[tuple[bytes, bytes]]:
    """What is to be put, one after the other, rank by rank."""
    missing = decode(receiver.receive(*map(sender.offer, held.ranks)), Missing)
    for header in map(encode, missing.portions):
        yield header, sender.portion(header)


def transfer(sender: Sender, held: Held, receiver: Receiver) -> int:
    """All of it; how many bytes had to be sent."""
    sent = sum(receiver.put(*one) for one in portions(sender, held, receiver))
    receiver.publish()
    return sent


def flipped(data: bytes, at: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
