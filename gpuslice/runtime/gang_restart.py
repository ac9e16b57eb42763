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


def make_room(ramdisk: RamDisk, store: JobStore, identity: RankIdentity) -> bool:
    """Before a checkpoint: keep the newest snapshot that all ranks of this node have.

    Returns
    -------
    bool
        Whether there is a slot besides it. The ranks take their checkpoints at the same boundaries, but not
        at the same instant: this rank's newest one stays while another rank writes its own of that boundary.
    """
    job, others = store.job, _others(identity)
    if job is None or not others:
        return True
    with ramdisk.comparing():
        newest = max(ramdisk.boundaries(job, identity.rank), default=_NONE)
        missing = [rank for rank in others if newest not in ramdisk.boundaries(job, rank)]
        if any(newest in ramdisk.being_written(job, rank) for rank in missing):
            return False
        _forget_uncommon(ramdisk, store, job, identity)
    return True


def keep_common(ramdisk: RamDisk, store: JobStore, identity: RankIdentity) -> None:
    """Before a suspend: keep the newest snapshot that all ranks of this node have, whatever else goes.

    One of them may be killed before it has a snapshot of the suspend.
    """
    if store.job is not None and _others(identity):
        with ramdisk.comparing():
            _forget_uncommon(ramdisk, store, store.job, identity)


def _others(identity: RankIdentity) -> list[int]:
    """The other ranks of this node."""
    return [rank for rank in identity.local_ranks if rank != identity.rank]


def _forget_uncommon(ramdisk: RamDisk, store: JobStore, job: str, identity: RankIdentity) -> None:
    """Forget what is newer than the newest snapshot that all have: the next one takes its slot.

    As the ranks compare one after the other, what all have at one time stays with all until they have a newer
    one: a snapshot is forgotten only while some rank lacks it.
    """
    common = newest_common(ramdisk.boundaries(job, rank) for rank in identity.local_ranks)
    if common is not None:
        store.forget_after(common)


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
