"""The sending end of a shipment: finds a job's newest whole snapshot in this node's RAM disk and reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuslice.checkpoint.format.checksums import fingerprint
from gpuslice.checkpoint.format.gsnp import RECORD_BYTES
from gpuslice.checkpoint.format.pieces import piece_ranges
from gpuslice.checkpoint.format.reader import DAMAGED, SnapshotFile, open_snapshot, record_of
from gpuslice.checkpoint.ramdisk.listing import restartable_files
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.slots import read_owner
from gpuslice.config import load
from gpuslice.errors import (
    CorruptSnapshotError,
    RemoteProtocolError,
    ReplacedSnapshotError,
    SnapshotError,
    UsageError,
)
from gpuslice.types import job_id

from .messages import Held, Offer, Portion, decode, encode

#: Number of attempts: a parked process may move its snapshot to or from the spill directory meanwhile.
_ATTEMPTS = 3


def open_disk(flags: Mapping[str, Any]) -> RamDisk:
    """Return this node's RAM disk, by its environment and the settings in its node's ``flags``."""
    return RamDisk.from_settings(load(**flags))


def newest_held(
    disk: RamDisk, job: str, ranks: int | Sequence[int] | None = None, boundary: int | None = None
) -> Held | None:
    """Return the newest snapshot of a named job that all its ranks here have; None if there is none.

    Parameters
    ----------
    ranks
        How many ranks the job has, or which of them are meant; by default those that have a store here.
    boundary
        Boundary of the snapshot; by default the newest one.
    """
    numbers = list(range(ranks) if isinstance(ranks, int) else ranks or _ranks(disk, job))
    common = [disk.boundaries(job, rank) for rank in numbers]
    if not common or not (shared := set.intersection(*common)):
        return None
    chosen = max(shared) if boundary is None else boundary
    if chosen not in shared:
        return None
    try:
        generation = record_of(_file(disk, job, numbers[0], chosen)).generation
    except SnapshotError:
        return newest_held(disk, job, ranks, boundary)  # it has been replaced this very moment
    owner = read_owner(disk.home(job, numbers[0]))
    if owner is None:
        return Held(job, chosen, generation, tuple(numbers))
    return Held(job, chosen, generation, tuple(numbers), owner.tenant, owner.tenant_limit_bytes)


def _ranks(disk: RamDisk, job: str) -> list[int]:
    """Return the ranks of a job that have a store here, in the RAM disk or spilled."""
    found = (info for info in disk.listing() if info.job == job)
    return sorted(info.rank for info in found if Path(info.directory) == disk.home(job, info.rank))


def _file(disk: RamDisk, job: str, rank: int, boundary: int) -> Path:
    file = restartable_files(disk.home(job, rank), disk.spilled).get(boundary)
    if file is None:
        raise ReplacedSnapshotError(
            f"the snapshot of boundary {boundary} of {job} was replaced while it was read",
            "suspend the job first, or send its snapshots less often",
        )
    return file


class Sender:
    """Reads one snapshot of a job; made in a process on the node that has it.

    Parameters
    ----------
    flags
        Settings of that node that its environment does not say: ``ramdisk_dir``, ``spill_dir``, ``socket``.
    """

    def __init__(self, flags: Mapping[str, str]) -> None:
        self._flags = dict(flags)
        self._held: Held | None = None
        self._offered: dict[int, _Offered] = {}

    def begin(self, job: str, ranks: int | Sequence[int] | None = None, boundary: int | None = None) -> bytes:
        """Choose the newest whole snapshot, or that of ``boundary``. Return an encoded ``Held``.

        Raises
        ------
        UsageError
            If the job has none here, or there is none of some rank.
        """
        self._disk = open_disk(self._flags)
        name = str(job_id(job))
        held = newest_held(self._disk, name, ranks, boundary)
        if held is None or (ranks is None and held.ranks != tuple(range(len(held.ranks)))):
            found = _ranks(self._disk, name)
            which = f"ranks {', '.join(map(str, found))} have" if found else "no rank has"
            raise UsageError(
                f"{name} has no whole snapshot in {self._disk.directory}: {which} a store there",
                "suspend or checkpoint the job first; `gpuslice ramdisk ls` shows what is there",
            )
        self._held = held
        return encode(held)

    def offer(self, rank: int) -> bytes:
        """Return a rank's snapshot without its payload, which is verified; an encoded ``Offer``.

        Raises
        ------
        CorruptSnapshotError
            If it is damaged.
        ReplacedSnapshotError
            If its job has taken so many others since `begin` that it is gone.
        """
        for _ in range(_ATTEMPTS):
            snapshot = self._open(rank)
            try:
                snapshot.verify()
            except CorruptSnapshotError:
                if self._is_unchanged(rank, snapshot):
                    raise
                continue
            record, arena = snapshot.record, snapshot.arena
            ranges = piece_ranges(snapshot.content.placement)
            keys = [fingerprint(arena[start:stop]) for start, stop in ranges]
            head = bytes(arena[: record.payload])
            tail = bytes(arena[record.tail : record.position + RECORD_BYTES])
            # A writer tears the header before anything else: if it is whole, so was all that was read.
            if self._is_unchanged(rank, snapshot):
                self._offered[rank] = _Offered(snapshot, ranges, keys)
                return encode(Offer(self._chosen, rank, head, tail, b"".join(keys)))
        raise self._moved_too_often()

    def portion(self, request: bytes) -> bytes:
        """Return the bytes of some pieces, verified against the offer. Raises as `offer` does."""
        wanted = decode(request, Portion)
        offered = self._offered.get(wanted.rank)
        if offered is None or max(wanted.pieces) >= len(offered.keys):
            raise RemoteProtocolError(f"rank {wanted.rank} was not offered, or has no such pieces")
        for _ in range(_ATTEMPTS):
            pieces = [offered.read(index) for index in wanted.pieces]
            if None not in pieces:
                return b"".join(piece for piece in pieces if piece is not None)
            if self._is_unchanged(wanted.rank, offered.snapshot):
                raise CorruptSnapshotError(
                    f"{offered.snapshot.path}: its bytes have changed since it was checked", DAMAGED
                )
            offered.snapshot = self._open(wanted.rank)
        raise self._moved_too_often()

    @property
    def _chosen(self) -> Held:
        if self._held is None:
            raise RemoteProtocolError("a snapshot was asked for before it was chosen")
        return self._held

    def _moved_too_often(self) -> ReplacedSnapshotError:
        return ReplacedSnapshotError(
            f"the snapshot of {self._chosen.job} does not stay in one place", "try again later"
        )

    def _open(self, rank: int) -> SnapshotFile:
        held = self._chosen
        for _ in range(_ATTEMPTS):
            file = _file(self._disk, held.job, rank, held.boundary)
            try:
                return open_snapshot(file)
            except SnapshotError:
                if _file(self._disk, held.job, rank, held.boundary) == file:
                    raise
        raise self._moved_too_often()

    def _is_unchanged(self, rank: int, snapshot: SnapshotFile) -> bool:
        """Return True if the snapshot still lies where it was opened, so that it was not overwritten."""
        held = self._chosen
        try:
            file = _file(self._disk, held.job, rank, held.boundary)
            return file == snapshot.path and record_of(file) == snapshot.record
        except ReplacedSnapshotError:
            raise
        except SnapshotError:
            return False


@dataclass(slots=True)
class _Offered:
    """A rank's snapshot, with the places and checksums of its pieces."""

    snapshot: SnapshotFile
    ranges: tuple[tuple[int, int], ...]
    keys: list[bytes]

    def read(self, index: int) -> bytes | None:
        """Return a piece; None if it has changed."""
        start, stop = self.ranges[index]
        data = bytes(self.snapshot.arena[start:stop])
        return data if fingerprint(data) == self.keys[index] else None
