"""What is asked of a copy between a device and an arena, and what it reports. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

#: Storages and their offsets in the arena.
Pairs: TypeAlias = "Sequence[tuple[torch.UntypedStorage, int]]"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Statistics of one copy.

    Attributes
    ----------
    paths
        Bytes by path. ``host``: by threads of this process. ``direct``: by a GPU's copy engine, from or to
        where they are. ``packed``: with many others by way of a staging buffer on the GPU. ``unchanged``:
        not at all, because they were there already. ``shared``: not at all, because another rank's snapshot
        has them.
    copies, launches
        Queued on the GPU.
    fallbacks
        Why a slower path had to be taken, one sentence each.
    """

    paths: Mapping[str, int] = field(default_factory=dict)
    copies: int = 0
    launches: int = 0
    fallbacks: tuple[str, ...] = ()

    @property
    def unchanged_bytes(self) -> int:
        """Bytes that were not copied because they were there already."""
        return self.paths.get("unchanged", 0)

    def __add__(self, other: Transfer) -> Transfer:
        return Transfer(
            dict(Counter(self.paths) + Counter(other.paths)),
            self.copies + other.copies,
            self.launches + other.launches,
            tuple(dict.fromkeys(self.fallbacks + other.fallbacks)),
        )


#: Looks at a chunk before it is copied, given where it lies, or will lie, in the arena, and its bytes. Says
#: whether to copy it; no, if the target has these very bytes already. Chunks come in any order and from
#: several threads, and begin at multiples of ``CHUNK_BYTES`` of their storage.
Inspector: TypeAlias = Callable[[int, memoryview], bool]


class Checksums(Protocol):
    """Receives the XXH3-128 of an arena's chunks from a device that computes them where the bytes are.

    Chunks with such a checksum are not inspected.
    """

    def padded(self, offset: int) -> int:
        """Return the length of the chunk at ``offset``, the zeros that follow it included."""
        ...

    def note(self, offset: int, nbytes: int, checksum: int) -> bool:
        """Take the checksum of a chunk and its zeros. Return True if the target already has the chunk."""
        ...


#: Those that see the chunks of one copy; either may be missing.
Watchers: TypeAlias = tuple[Inspector | None, Checksums | None]
