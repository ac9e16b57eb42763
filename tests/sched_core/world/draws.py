"""Chance by keys: what is drawn depends on what it is drawn for, not on what was drawn before."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

_T = TypeVar("_T")
_WHOLE = 1 << 64


class Draws:
    """Everything that chance decides in one world.

    Two schedulers that act at other moments meet the same faults: the key of a fault names what happens (the
    job, its attempt, the rank, the n-th suspend), not when.

    Parameters
    ----------
    seed
        Of the world.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def unit(self, *key: object) -> float:
        """Return a number from 0 up to 1, always the same for the same ``key``."""
        digest = blake2b(repr((self._seed, *key)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / _WHOLE

    def chance(self, share: float, *key: object) -> bool:
        """Return True for ``share`` of all keys."""
        return self.unit(*key) < share

    def between(self, least: float, most: float, *key: object) -> float:
        """Return a number from ``least`` up to ``most``."""
        return least + (most - least) * self.unit(*key)

    def number(self, least: int, most: int, *key: object) -> int:
        """Return a whole number from ``least`` to ``most``."""
        return least + int((most - least + 1) * self.unit(*key))

    def choice(self, options: Sequence[_T], *key: object) -> _T:
        """Return one of ``options``."""
        return options[int(len(options) * self.unit(*key))]

    def sample(self, options: Sequence[_T], count: int, *key: object) -> list[_T]:
        """Return ``count`` different ones of ``options``."""
        order = sorted(range(len(options)), key=lambda index: self.unit(*key, index))
        return [options[index] for index in order[:count]]
