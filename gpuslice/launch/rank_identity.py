"""The rank of this process in its job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpuslice.errors import ConfigError
from gpuslice.types import MAX_RANKS, DeviceName

#: Variable that the process with the hooks sets for its descendants; see sitedir/sitecustomize.py.
ARMED = "GPUSLICE_ARMED"


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """The rank of this process, as torchrun and other launchers set it in the environment."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> RankIdentity:
        """Return the identity that ``environ`` holds; without variables, rank 0 of 1.

        The variables are ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE``. Without the last
        one all ranks are on this node.

        Raises
        ------
        ConfigError
            If one of them is no possible number.
        """
        rank, world_size = _stated(environ, "RANK", 0), _stated(environ, "WORLD_SIZE", 1)
        local_world_size = _stated(environ, "LOCAL_WORLD_SIZE", world_size)
        return cls(rank, _stated(environ, "LOCAL_RANK", rank), world_size, local_world_size)

    @classmethod
    def in_group(cls, rank: int, world_size: int, environ: Mapping[str, str]) -> RankIdentity:
        """Return the identity of a process group's member, with its rank on the node from the launcher.

        If no launcher gives the rank on the node, all ranks are taken to be on this one.
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
        """Return this rank's device, given the device of the node's first rank.

        ``cpu`` is the whole host for all ranks.
        """
        if first.index is None:
            return first
        # Each rank has as many GPUs as the first.
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
