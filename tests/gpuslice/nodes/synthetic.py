"""Snapshots without a training: random storages, as a job's ranks would have written them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gpuslice.checkpoint.format.layout import Layout, StorageSpec, TensorSpec
from gpuslice.checkpoint.format.reader import open_snapshot
from gpuslice.checkpoint.format.tree import encode
from gpuslice.checkpoint.ramdisk.budget import NOBODY, Tenant
from gpuslice.checkpoint.ramdisk.listing import restartable_files
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk

#: Two pieces of 4 MiB and a shorter one, a storage that is a piece, and small ones that share pieces.
SIZES = (9_000_000, 100, 1 << 20, 70_001, 0, 300)

Storages = list[bytes]


def storages(seed: int, sizes: Sequence[int] = SIZES) -> Storages:
    random = np.random.default_rng(seed)
    return [random.bytes(nbytes) for nbytes in sizes]


def take(
    directory: Path,
    job: str,
    boundary: int,
    ranks: Sequence[Storages],
    *,
    spill: Path | None = None,
    tenant: Tenant = NOBODY,
    scheduler: str = "",
) -> None:
    """Have a process that takes a snapshot of every rank at this boundary, and dies."""
    disk = RamDisk(directory, spill_directory=spill, tenant=tenant, scheduler=scheduler)
    for rank, contents in enumerate(ranks):
        store = disk.open_store(job, rank, ranks=range(len(ranks)))
        specs = tuple(StorageSpec(len(one), "cpu", f"s{sid}") for sid, one in enumerate(contents))
        tensors = [TensorSpec(f"t{sid}", sid, "uint8", (s.nbytes,), (1,)) for sid, s in enumerate(specs)]
        with store.begin(Layout(specs), share=len(ranks) > 1) as writer:
            for sid, content in enumerate(contents):
                writer.view(sid)[:] = content
            tree = encode({"boundary": boundary, "rank": rank})
            writer.publish(tree, tensors, boundary=boundary, restartable=True)
        store.abandon()


def found(directory: Path, job: str, boundary: int, rank: int = 0, *, spill: Path | None = None) -> Storages:
    """A rank's storages as they lie there, every byte checked."""
    disk = RamDisk(directory, spill_directory=spill)
    file = restartable_files(disk.home(job, rank), disk.spilled)[boundary]
    with open_snapshot(file) as snapshot:
        snapshot.verify()
        assert snapshot.record.rank == rank
        assert snapshot.tree == encode({"boundary": boundary, "rank": rank})
        return [bytes(snapshot.view(sid)) for sid in range(len(snapshot.content.layout.storages))]


def boundaries(directory: Path, job: str, ranks: int = 1) -> list[set[int]]:
    """Of which boundaries each rank has a snapshot there."""
    return [RamDisk(directory).boundaries(job, rank) for rank in range(ranks)]
