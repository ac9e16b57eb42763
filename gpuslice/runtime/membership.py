"""Which ranks of an elastic job train together, as its scheduler says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Membership:
    """The ranks ``0`` to ``width - 1``, since the lease with epoch ``world``.

    A rank that was away meanwhile, and one that has just begun, sees another ``world`` than it was in.
    """

    world: int
    width: int
