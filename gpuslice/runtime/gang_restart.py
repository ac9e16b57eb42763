"""Where a gang goes on: its ranks may have died between two snapshots, but must restart from the same one."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist

from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.errors import UsageError
from gpuslice.launch.rank_identity import RankIdentity

#: More restartable snapshots than a rank ever has.
_MOST = 4
_NONE = -1


def newest_common(boundaries: Iterable[Collection[int]]) -> int | None:
    """The newest boundary that every rank has, given each rank's; ``None`` if there is none."""
    common = set.intersection(*(set(of_rank) for of_rank in boundaries))
    return max(common, default=None)


def awaited(mine: Collection[int], others: Iterable[Collection[int]]) -> bool:
    """Whether this rank must keep its newest snapshot because the others may yet take theirs there.

    Parameters
    ----------
    mine
        Boundaries of this rank's snapshots.
    others
        Of each other rank's. They grow: a rank whose newest is older may yet take that one.
    """
    newest = max(mine, default=_NONE)
    lists = [set(of_rank) for of_rank in others]
    missing = [of_rank for of_rank in lists if newest not in of_rank]
    return newest != _NONE and bool(missing) and all(max(r, default=_NONE) < newest for r in missing)


def make_room(ramdisk: RamDisk, store: JobStore, job: str, identity: RankIdentity) -> bool:
    """Keep the newest snapshot that all ranks of this node have; whether there is a slot besides it.

    The ranks take their checkpoints at the same boundaries, but not at the same instant. One that is
    ahead must not overwrite what another has yet to reach; it asks again at the next boundary.
    """
    neighbours = [rank for rank in identity.local_ranks if rank != identity.rank]
    if not neighbours:
        return True
    mine = ramdisk.boundaries(job, identity.rank)
    others = [ramdisk.boundaries(job, rank) for rank in neighbours]
    if awaited(mine, others):
        return False
    common = newest_common([mine, *others])
    if common is not None:
        store.forget_after(common)
    return True


def agree(boundaries: Collection[int], world_size: int) -> int | None:
    """The newest boundary of which all ranks have a snapshot. A collective: every rank calls it.

    Parameters
    ----------
    boundaries
        Of this rank's restartable snapshots.
    world_size
        Ranks of the job.

    Raises
    ------
    UsageError
        If the ranks cannot talk to each other yet.
    """
    if world_size == 1:
        return newest_common([boundaries])
    if not dist.is_initialized():
        raise UsageError(
            f"a named job of {world_size} ranks is attached before they can agree where to go on",
            "call torch.distributed.init_process_group before gpuslice.attach",
        )
    gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    mine = torch.full((_MOST,), _NONE, dtype=torch.int64, device=device)
    newest = sorted(boundaries)[-_MOST:]
    mine[: len(newest)] = torch.tensor(newest, dtype=torch.int64)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    return newest_common([set(row.tolist()) - {_NONE} for row in everybody])
