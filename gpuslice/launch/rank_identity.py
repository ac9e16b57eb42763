"""Which rank of its job this process is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpuslice.errors import ConfigError
from gpuslice.types import MAX_RANKS, DeviceName

#: Set by the process that got the hooks, for those below it; see sitedir/sitecustomize.py.
ARMED = "GPUSLICE_ARMED"


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Which of its job's processes this one is, as torchrun and others tell it in the environment."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> RankIdentity:
        """Read ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``; without them it is alone.

        Without ``LOCAL_WORLD_SIZE`` all ranks are on this node.

        Raises
        ------
        ConfigError
            If one is no number of ranks.
        """
        rank, world_size = _stated(environ, "RANK", 0), _stated(environ, "WORLD_SIZE", 1)
        local_world_size = _stated(environ, "LOCAL_WORLD_SIZE", world_size)
        return cls(rank, _stated(environ, "LOCAL_RANK", rank), world_size, local_world_size)

    @classmethod
    def in_group(cls, rank: int, world_size: int, environ: Mapping[str, str]) -> RankIdentity:
        """Of a process group's member. What launchers say besides its rank is taken as far as it fits.

        Where nobody says which rank of its node it is, all ranks are on this one.
        """
        local_rank = _number(environ, "LOCAL_RANK")
        if local_rank is None or local_rank > rank:
            return cls(rank, rank, world_size, world_size)
        local_world_size = _number(environ, "LOCAL_WORLD_SIZE")
        node = _number(environ, "NODE_RANK") or _number(environ, "GROUP_RANK")
        if local_world_size is None:
            local_world_size = (rank - local_rank) // node if node else world_size
        return cls(rank, local_rank, world_size, max(local_world_size, local_rank + 1))

    @property
    def local_ranks(self) -> range:
        """The job's ranks on this node, this one included."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)

    def device(self, first: DeviceName) -> DeviceName:
        """This rank's device when rank 0 of the node has ``first``; ``cpu`` is the whole host for all."""
        if first.index is None:
            return first
        # Each rank has as many as the first.
        start = self.local_rank * len(first.indices)
        index, *further = (start + index for index in first.indices)
        return DeviceName(first.kind, index, tuple(further))


def _stated(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environ.get(name)
    if text is None:
        return otherwise
    number = _number(environ, name)
    if number is None or number > MAX_RANKS:
        raise ConfigError(f"{name} is {text[:60]!r}", f"set it to a number up to {MAX_RANKS}, or unset it")
    return number


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None
