"""The end of a journal, in a small file beside it: the number of its last event and its running checksum.

SQLite treats a truncated log as one that ends there. So the end is recorded outside of it, in place and
without waiting for the disk: the file survives whatever SQLite's log survives.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

_SUM_BYTES = 16
#: The checksum before the first event.
START = bytes(_SUM_BYTES)
_NUMBERS = struct.Struct("<qd")


def link(former: bytes, number: int, at_s: float, event: bytes) -> bytes:
    """Return the running checksum of event ``number``, given ``former``, that of the event before."""
    return blake2b(former + _NUMBERS.pack(number, at_s) + event, digest_size=_SUM_BYTES).digest()


def checksum(data: bytes) -> bytes:
    """Return the checksum of ``data`` alone."""
    return blake2b(data, digest_size=_SUM_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Head:
    """The end of a journal.

    Attributes
    ----------
    number
        Number of the last event; 0 without one.
    chain
        Its running checksum.
    introduced
        True if the journal describes its core.
    """

    number: int = 0
    chain: bytes = START
    introduced: bool = False

    def encode(self) -> bytes:
        """Return the head as a line of fixed length."""
        line = b"%020d %s %d " % (self.number, self.chain.hex().encode(), self.introduced)
        return line + checksum(line).hex().encode() + b"\n"


def decode(line: bytes) -> Head:
    """Return the head that ``line`` encodes.

    Raises
    ------
    ValueError
        If it stands for none.
    """
    number, chain, introduced, _ = line.split(b" ")
    head = Head(int(number), bytes.fromhex(chain.decode("ascii")), introduced == b"1")
    if head.encode() != line:
        raise ValueError("its checksum is wrong")
    return head


def path_of(journal: Path) -> Path:
    """Return the path of the head of ``journal``."""
    return journal.with_suffix(".head")


class HeadFile:
    """The file of a head, open for writing.

    Parameters
    ----------
    path
        Made if need be.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o600)

    def write(self, head: Head) -> None:
        """Replace the file's content. A process that dies meanwhile leaves the old or the new content."""
        os.pwrite(self._descriptor, head.encode(), 0)

    def sync(self) -> None:
        """Wait until the content is on the medium."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
