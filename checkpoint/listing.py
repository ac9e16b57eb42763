"""What lies in the RAM disk and in the spill directory, as ``gpuslice ramdisk ls`` shows it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from .budget import directory_bytes
from .locks import FileLock
from .slots import OWNER, SLOTS, Owner, committed, read_owner
from .spill import SpillDirectory

STORE = re.compile(r"(?P<job>.+)\.r(?P<rank>\d+)")
#: Begins the directory names of jobs without a name; no job's name can begin with it.
UNNAMED = "_"


class StoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One store as ``gpuslice ramdisk ls`` shows it.

    Attributes
    ----------
    job
        The job's name, or ``None`` for a job without one.
    rank
        Its rank.
    tenant
        Whose it is; empty for nobody's.
    pid
        The process that has it, or had it last; ``None`` if that is not known.
    alive
        Whether that process lives.
    bytes
        What the store takes up.
    generation, boundary, restartable
        Of its newest published snapshot; ``None``, ``None`` and ``False`` without one.
    snapshot
        That snapshot's file, or ``None``.
    directory
        Where the store is.
    spilled
        Whether its snapshot lies in the spill directory.
    """

    job: str | None
    rank: int
    tenant: str
    pid: int | None
    alive: bool
    bytes: int
    generation: int | None
    boundary: int | None
    restartable: bool
    snapshot: str | None
    directory: str
    spilled: bool = False


class TenantInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant's jobs have in the RAM disk.

    Attributes
    ----------
    tenant
        Its name.
    used_bytes
        What all its stores take up.
    limit_bytes
        Most that they may, as the process that began last was told; ``None`` for no limit of its own.
    """

    tenant: str
    used_bytes: int
    limit_bytes: int | None


def store_info(directory: Path) -> StoreInfo:
    """What there is to say about one store; the caller holds the RAM disk's lock."""
    match = STORE.fullmatch(directory.name)
    assert match is not None
    lock = FileLock.attempt(directory / OWNER)
    if lock is not None:
        lock.release()
    owner = read_owner(directory)
    newest = next(iter(committed(directory)), None)
    return StoreInfo(
        job=None if match["job"].startswith(UNNAMED) else match["job"],
        rank=int(match["rank"]),
        tenant=owner.tenant if owner else "",
        pid=owner.pid if owner else None,
        alive=lock is None,
        bytes=directory_bytes(directory),
        generation=newest.generation if newest else None,
        boundary=newest.boundary if newest else None,
        restartable=newest.restartable if newest else False,
        snapshot=str(directory / SLOTS[newest.slot]) if newest else None,
        directory=str(directory),
    )


def spilled_stores(spilled: SpillDirectory) -> Iterator[StoreInfo]:
    """What there is to say about the snapshots in the spill directory."""
    for store in spilled.stores():
        match = STORE.fullmatch(store)
        if match is None:
            continue
        snapshot = spilled.snapshot(store)
        path = spilled.path(store)
        yield StoreInfo(
            job=match["job"],
            rank=int(match["rank"]),
            tenant="",
            pid=None,
            alive=False,
            bytes=path.lstat().st_size,
            generation=snapshot.generation if snapshot else None,
            boundary=snapshot.boundary if snapshot else None,
            restartable=snapshot.restartable if snapshot else False,
            snapshot=str(path) if snapshot else None,
            directory=str(spilled.directory / store),
            spilled=True,
        )
        if snapshot is not None:
            snapshot.close()


def tenants(directories: Iterable[Path]) -> list[TenantInfo]:
    """What every tenant has in these stores, by name; the caller holds the RAM disk's lock."""
    used: Counter[str] = Counter()
    latest: dict[str, Owner] = {}
    for directory in directories:
        owner = read_owner(directory)
        if owner is not None and owner.tenant:
            used[owner.tenant] += directory_bytes(directory)
            latest[owner.tenant] = max(owner, latest.get(owner.tenant, owner), key=lambda one: one.started_s)
    return [
        TenantInfo(tenant=name, used_bytes=used[name], limit_bytes=latest[name].tenant_limit_bytes)
        for name in sorted(latest)
    ]
