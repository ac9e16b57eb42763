"""``gpuslice ramdisk``: list the RAM disk, clean up after the dead, check and export snapshots."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from gpuslice.checkpoint.format.reader import SnapshotFile, open_snapshot
from gpuslice.checkpoint.ramdisk.listing import StoreInfo, TenantInfo
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.config import format_size, load
from gpuslice.errors import SnapshotError, UsageError

app = typer.Typer(help="Look after the RAM disk and its snapshots.")

Directory = Annotated[
    str | None, typer.Option("--dir", help="The RAM disk's directory, if not the usual one.")
]
Spill = Annotated[str | None, typer.Option("--spill-dir", help="Where snapshots go if the RAM disk is full.")]
Limit = Annotated[
    str | None, typer.Option("--spill-limit", metavar="50G", help="Most bytes of snapshots in --spill-dir.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; the keys are documented and stay.")]
Snapshot = Annotated[
    str,
    typer.Argument(
        help="A snapshot's file, or the job whose newest one is meant (JOB.r1: of its rank 1).",
        metavar="FILE|JOB",
    ),
]


class Format(StrEnum):
    """What a snapshot can be exported to."""

    SAFETENSORS = "safetensors"
    DCP = "dcp"


_COLUMNS = (
    "job",
    "rank",
    "tenant",
    "scheduler",
    "pid",
    "state",
    "size",
    "place",
    "generation",
    "boundary",
    "restartable",
)


@app.command()
def ls(
    directory: Directory = None, spill_dir: Spill = None, spill_limit: Limit = None, as_json: Json = False
) -> None:
    """List what every job has in the RAM disk, and the totals against the limits."""
    disk = _open(directory, spill_dir, spill_limit)
    stores, tenants, used = disk.listing(), disk.tenants(), disk.used_bytes
    if as_json:
        _print_json(
            directory=str(disk.directory),
            limit_bytes=disk.limit_bytes,
            used_bytes=used,
            free_bytes=disk.free_bytes,
            spill_directory=None if disk.spilled is None else str(disk.spilled.directory),
            spilled_bytes=None if disk.spilled is None else disk.spilled.used_bytes(),
            spill_limit_bytes=None if disk.spilled is None else disk.spilled.limit_bytes,
            spill_free_bytes=None if disk.spilled is None else disk.spilled.free_bytes,
            tenants=[msgspec.to_builtins(tenant) for tenant in tenants],
            stores=[msgspec.to_builtins(store) for store in stores],
        )
        return
    if stores:
        _print_table(stores)
    for tenant in tenants:
        print(_tenant(tenant))
    print(f"{disk.directory}: {format_size(used)} of {format_size(disk.limit_bytes)} used")
    if disk.spilled is not None:
        used, free = disk.spilled.used_bytes(), disk.spilled.free_bytes
        limit = disk.spilled.limit_bytes
        of = "" if limit is None else f" of {format_size(limit)}"
        print(f"{disk.spilled.directory}: {format_size(used)}{of} spilled, {format_size(free)} free")


@app.command()
def gc(
    directory: Directory = None,
    spill_dir: Spill = None,
    as_json: Json = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also the snapshots that dead named jobs could go on from.")
    ] = False,
) -> None:
    """Remove what dead processes left behind; never anything of a living one."""
    disk = _open(directory, spill_dir)
    before = disk.used_bytes
    removed = disk.collect(everything=everything)
    freed = max(0, before - disk.used_bytes)
    if as_json:
        _print_json(removed=[msgspec.to_builtins(store) for store in removed], freed_bytes=freed)
    else:
        print(f"{disk.directory}: {_count(len(removed), 'store')} removed, {format_size(freed)} freed")


@app.command()
def spill(
    directory: Directory = None, spill_dir: Spill = None, spill_limit: Limit = None, as_json: Json = False
) -> None:
    """Move the snapshots of dead named jobs to the spill directory; the jobs bring them back."""
    disk = _open(directory, spill_dir, spill_limit)
    moved = disk.spill()
    if as_json:
        _print_json(spilled=[msgspec.to_builtins(store) for store in moved])
    else:
        print(f"{disk.directory}: {_count(len(moved), 'snapshot')} spilled")


@app.command()
def verify(
    snapshot: Snapshot, directory: Directory = None, spill_dir: Spill = None, as_json: Json = False
) -> None:
    """Check every byte of a snapshot; exit code 4 if it is damaged or not acceptable."""
    file = _file(snapshot, directory, spill_dir)
    try:
        with open_snapshot(file) as opened:
            opened.verify()
            description = _describe(opened)
    except SnapshotError as error:
        if as_json:
            _print_json(path=str(file), whole=False, error=error.message, remedy=error.remedy)
            raise typer.Exit(error.exit_code) from error
        raise
    if as_json:
        _print_json(path=str(file), whole=True, **description)
        return
    print(
        f"{file}: whole; generation {description['generation']}, boundary {description['boundary']},"
        f" {_count(description['tensors'], 'tensor')}, {format_size(description['bytes'])}"
    )


@app.command()
def export(
    snapshot: Snapshot,
    out: Annotated[Path, typer.Argument(help="The file to write; for dcp, the directory.", metavar="OUT")],
    kind: Annotated[
        Format, typer.Option("--format", help="A safetensors file or a torch.distributed.checkpoint.")
    ] = Format.SAFETENSORS,
    directory: Directory = None,
    spill_dir: Spill = None,
    as_json: Json = False,
) -> None:
    """Write a snapshot's tensors in a format that other tools read."""
    with open_snapshot(_file(snapshot, directory, spill_dir)) as opened:
        if kind is Format.DCP:
            from gpuslice.checkpoint.named.export_dcp import export_dcp

            count = export_dcp(opened, out)
        else:
            from gpuslice.checkpoint.format.export_safetensors import export_safetensors

            count = export_safetensors(opened, out)
    nbytes = sum(path.stat().st_size for path in ([out] if out.is_file() else out.iterdir()))
    if as_json:
        _print_json(path=str(out), tensors=count, bytes=nbytes)
    else:
        print(f"{out}: {_count(count, 'tensor')}, {format_size(nbytes)}")


def _open(directory: str | None, spill_dir: str | None, spill_limit: str | None = None) -> RamDisk:
    if directory is not None and not os.path.lexists(directory):
        raise UsageError(f"--dir {directory} does not exist", "name one that a job has used")
    return RamDisk.from_settings(load(ramdisk_dir=directory, spill_dir=spill_dir, spill_limit=spill_limit))


def _file(snapshot: str, directory: str | None, spill_dir: str | None) -> Path:
    """Return the file of a snapshot, which is named by its path or else by its job."""
    path = Path(snapshot)
    if os.path.lexists(path) or path.name != snapshot:
        return path
    disk = _open(directory, spill_dir)
    stores = [store for store in disk.listing() if snapshot in (store.job, Path(store.directory).name)]
    if not stores:
        return path
    if len(stores) > 1:
        names = ", ".join(Path(store.directory).name for store in stores)
        raise UsageError(f"{snapshot} has several snapshots in {disk.directory}", f"name one of {names}")
    if stores[0].snapshot is None:
        raise UsageError(f"{snapshot} has no snapshot in {disk.directory}", "suspend or checkpoint it first")
    return Path(stores[0].snapshot)


def _describe(snapshot: SnapshotFile) -> dict[str, Any]:
    record = snapshot.record
    return {
        "job": record.job or None,
        "rank": record.rank,
        "generation": record.generation,
        "boundary": record.boundary,
        "restartable": record.restartable,
        "bytes": snapshot.nbytes,
        "storages": len(snapshot.storages),
        "tensors": len(snapshot.tensors),
    }


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _print_json(**values: object) -> None:
    print(json.dumps(values, indent=2))


def _print_table(stores: Sequence[StoreInfo]) -> None:
    rows = [_COLUMNS, *map(_row, stores)]
    if not sys.stdout.isatty():
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*_COLUMNS)
    for row in rows[1:]:
        table.add_row(*row)
    Console().print(table)


def _tenant(info: TenantInfo) -> str:
    limit = "" if info.limit_bytes is None else f" of {format_size(info.limit_bytes)}"
    return f"tenant {info.tenant}: {format_size(info.used_bytes)}{limit} used"


def _row(store: StoreInfo) -> tuple[str, ...]:
    def text(value: object) -> str:
        return "-" if value is None else str(value)

    return (
        text(store.job),
        str(store.rank),
        store.tenant or "-",
        store.scheduler or "-",
        text(store.pid),
        "alive" if store.alive else "dead",
        format_size(store.bytes),
        text(store.place),
        text(store.generation),
        text(store.boundary),
        "yes" if store.restartable else "no",
    )
