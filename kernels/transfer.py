"""What a copy between a device and an arena was made of; needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Transfer:
    """How the bytes of one copy went.

    Attributes
    ----------
    paths
        Bytes by path. ``host``: by threads of this process. ``direct``: by a GPU's copy engine, from or to
        where they are. ``packed``: with many others by way of a staging buffer on the GPU. ``unchanged``:
        not at all, because they were there already.
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
