"""What lies in the RAM disk and in the spill directory, as ``gpuslice ramdisk ls`` shows it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import msgspec

from gpuslice.checkpoint.locks import FileLock

from .budget import directory_bytes, held_bytes
from .slots import OWNER, SLOTS, Owner, published, read_owner
from .spill import SpillDirectory

#: A store's name; with a ``+``, of a training that waits (``aside``).
STORE = re.compile(
    r"(?P<job>[^@+]+)(@(?P<scheduler>[0-9a-f]{8}))?(\+(?P<training>[0-9a-f]{16}))?\.r(?P<rank>\d+)"
)
#: Begins the directory names of jobs without a name; no job's name can begin with it.
UNNAMED = "_"


class Place(StrEnum):
    """Where a store's newest snapshot is."""

    RAM = "in RAM"
    SPILLING = "spilling"
    SPILLED = "spilled"


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
    scheduler
        The directory of the scheduler whose job it is, empty without one; where only a spilled snapshot is
        left, what the store's name has of it.
    pid
        The process that has it, or had it last; ``None`` if that is not known.
    alive
        Whether that process lives.
    bytes
        What the store takes up, here and in the spill directory; of what ranks share, its part.
    generation, boundary, restartable
        Of its newest published snapshot; ``None``, ``None`` and ``False`` without one.
    snapshot
        That snapshot's file, or ``None``.
    directory
        Where the store is.
    spilled
        Whether that snapshot lies in the spill directory only.
    spilled_bytes
        Of ``bytes``, those in the spill directory.
    place
        Where that snapshot is; ``None`` without one.
    """

    job: str | None
    rank: int
    tenant: str
    scheduler: str
    pid: int | None
    alive: bool
    bytes: int
    generation: int | None
    boundary: int | None
    restartable: bool
    snapshot: str | None
    directory: str
    spilled: bool
    spilled_bytes: int
    place: Place | None


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


def store_info(directory: Path, spill: SpillDirectory | None = None) -> StoreInfo:
    """What there is to say about one store and its spilled snapshots; with the RAM disk's lock held."""
    match = STORE.fullmatch(directory.name)
    assert match is not None
    owner, alive = read_owner(directory), is_alive(directory)
    entries = [] if spill is None else spill.entries(directory.name)
    spilled_bytes = sum(entry.size_bytes() for entry in entries)
    here = published(directory)
    spilled = [] if spill is None else spill.records(directory.name)
    # Of one that is in both places the former counts.
    newest = max([*here, *spilled], key=lambda record: record.generation, default=None)
    place, snapshot = None, None
    if newest is not None and newest in here:
        moving = alive and spill is not None and spill.arriving(directory.name)
        place, snapshot = Place.SPILLING if moving else Place.RAM, directory / SLOTS[newest.slot]
    elif newest is not None and spill is not None:
        place, snapshot = Place.SPILLED, spill.path(directory.name, newest.slot)
    return StoreInfo(
        job=None if match["job"].startswith(UNNAMED) else match["job"],
        rank=int(match["rank"]),
        tenant=owner.tenant if owner else "",
        scheduler=owner.scheduler if owner else match["scheduler"] or "",
        pid=owner.pid if owner else None,
        alive=alive,
        bytes=directory_bytes(directory) + spilled_bytes,
        generation=newest.generation if newest else None,
        boundary=newest.boundary if newest else None,
        restartable=newest.restartable if newest else False,
        snapshot=str(snapshot) if snapshot else None,
        directory=str(directory),
        spilled=place is Place.SPILLED,
        spilled_bytes=spilled_bytes,
        place=place,
    )


def restartable_files(directory: Path, spill: SpillDirectory | None = None) -> dict[int, Path]:
    """The files of a store's published restartable snapshots, by boundary, alive or not; the spilled, too.

    Of two that are of one boundary, the newer one in the RAM disk counts.
    """
    spilled = [] if spill is None else [(spill, one) for one in spill.records(directory.name)]
    found = {
        record.boundary: where.path(directory.name, record.slot)
        for where, record in spilled
        if record.restartable
    }
    for record in reversed(published(directory)):
        if record.restartable:
            found[record.boundary] = directory / SLOTS[record.slot]
    return found


def is_alive(directory: Path) -> bool:
    """Whether some process has the store; the caller holds the RAM disk's lock."""
    try:
        lock = FileLock.attempt(directory / OWNER)
    except FileNotFoundError:
        return False
    if lock is not None:
        lock.release()
    return lock is None


def tenants(directories: Iterable[Path]) -> list[TenantInfo]:
    """What every tenant has in these stores, by name; the caller holds the RAM disk's lock."""
    theirs: defaultdict[str, list[Path]] = defaultdict(list)
    latest: dict[str, Owner] = {}
    for directory in directories:
        owner = read_owner(directory)
        if owner is not None and owner.tenant:
            theirs[owner.tenant].append(directory)
            latest[owner.tenant] = max(owner, latest.get(owner.tenant, owner), key=lambda one: one.started_s)
    return [
        TenantInfo(
            tenant=name, used_bytes=held_bytes(theirs[name]), limit_bytes=latest[name].tenant_limit_bytes
        )
        for name in sorted(latest)
    ]
