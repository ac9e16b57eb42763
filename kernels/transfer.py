"""Copies between a device and an arena: what is asked of one, and what it was made of; needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

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


class Inspector(Protocol):
    """Sees every chunk of a copy, in any order and from several threads.

    Chunks begin at multiples of ``CHUNK_BYTES`` of their storage.
    """

    def __call__(self, offset: int, data: memoryview) -> bool:
        """Look at a chunk before it is copied.

        Parameters
        ----------
        offset
            Where it lies, or will lie, in the arena.
        data
            The bytes to be copied.

        Returns
        -------
        bool
            Whether to copy it; no, if the target has these very bytes already.
        """
        ...


class Marks(Protocol):
    """Keeps the marks that a GPU makes of chunks where they are: 128 bits, the same for the same bytes only.

    What a mark is a function of is the device's own business (digest.cu): marks are compared with marks,
    never with checksums, and never leave the process.
    """

    def __call__(self, offset: int, mark: int) -> bool:
        """Note the mark of the chunk for this offset of the arena.

        Returns
        -------
        bool
            Whether the arena holds that very chunk there already. Then it is neither copied nor inspected.
        """
        ...
