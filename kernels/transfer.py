"""Copies between a device and an arena: what is asked of one, and what it was made of; needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

#: Storages and their offsets in the arena.
Pairs: TypeAlias = "Sequence[tuple[torch.UntypedStorage, int]]"


@dataclass(frozen=True, slots=True)
class Transfer:
    """How the bytes of one copy went.

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
#: Notes the mark that a GPU makes of the chunk for an offset of the arena: 128 bits, the same for the same
#: bytes only. Says whether the arena holds that very chunk there already; then it is neither copied nor
#: inspected. What a mark is a function of is the device's own business (digest.cu): marks are compared with
#: marks, never with checksums, and never leave the process.
Marks: TypeAlias = Callable[[int, int], bool]
