"""Which rank of its job this process is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuslice.types import DeviceName


@dataclass(frozen=True, slots=True)
class Place:
    """Which of its job's processes this one is, as torchrun and others tell it in the environment."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Place:
        """Read ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``; without them it is alone.

        Without ``LOCAL_WORLD_SIZE`` all ranks are on this node.
        """
        rank, world_size = int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
        local_world_size = int(environ.get("LOCAL_WORLD_SIZE", world_size))
        return cls(rank, int(environ.get("LOCAL_RANK", rank)), world_size, local_world_size)

    @property
    def local_ranks(self) -> range:
        """The job's ranks on this node, this one included."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)

    def device(self, first: DeviceName) -> DeviceName:
        """This rank's device when rank 0 of the node has ``first``; ``cpu`` is the whole host for all."""
        if first.index is None:
            return first
        return DeviceName(first.kind, first.index + self.local_rank)
