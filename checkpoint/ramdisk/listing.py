"""List the contents of the RAM disk and of the spill directory, for ``gpuslice ramdisk ls``."""

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

#: A store's name; with a ``+`` for a training that is set aside (``aside``).
STORE = re.compile(
    r"(?P<job>[^@+]+)(@(?P<scheduler>[0-9a-f]{8}))?(\+(?P<training>[0-9a-f]{16}))?\.r(?P<rank>\d+)"
)
#: Prefix of the directory names of jobs without a name. No job's name can begin with it.
UNNAMED = "_"


class Place(StrEnum):
    """The place of a store's newest snapshot."""

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
        Its tenant; empty without one.
    scheduler
        The directory of the job's scheduler, empty without one. If only a spilled snapshot is
        left, the part of it that the store's name has.
    pid
        The process that holds it, or held it last; None if unknown.
    alive
        True if that process lives.
    bytes
        Bytes that the store takes up, here and in the spill directory. Shared files count in parts.
    generation, boundary, restartable
        Of its newest published snapshot; ``None``, ``None`` and ``False`` without one.
    snapshot
        That snapshot's file, or ``None``.
    directory
        Where the store is.
    spilled
        True if that snapshot lies in the spill directory only.
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
    """The use of the RAM disk by one tenant's jobs.

    Attributes
    ----------
    tenant
        Its name.
    used_bytes
        What all its stores take up.
    limit_bytes
        Most that they may take, as set for the process that started last; None for no own limit.
    """

    tenant: str
    used_bytes: int
    limit_bytes: int | None


def store_info(directory: Path, spill: SpillDirectory | None = None) -> StoreInfo:
    """Return the facts about one store and its spilled snapshots. The caller holds the RAM disk's lock."""
    match = STORE.fullmatch(directory.name)
    assert match is not None
    owner, alive = read_owner(directory), is_alive(directory)
    entries = [] if spill is None else spill.entries(directory.name)
    spilled_bytes = sum(entry.size_bytes() for entry in entries)
    here = published(directory)
    spilled = [] if spill is None else spill.records(directory.name)
    # If a snapshot is in both places, the one in the RAM disk counts.
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
    """Return the files of a store's restartable snapshots, by boundary, spilled ones included.

    The store's process may be alive. If there are two snapshots of one boundary, the newer one in the RAM
    disk counts.
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
    """Return True if a process holds the store. The caller holds the RAM disk's lock."""
    try:
        lock = FileLock.attempt(directory / OWNER)
    except FileNotFoundError:
        return False
    if lock is not None:
        lock.release()
    return lock is None


def tenants(directories: Iterable[Path]) -> list[TenantInfo]:
    """Return each tenant's use of these stores, by name. The caller holds the RAM disk's lock."""
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
