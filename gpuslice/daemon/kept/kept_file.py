"""``kept.json``: what a later scheduler, perhaps of another version, must know of the kept jobs.

The file is written once all jobs are kept, and removed before the next scheduler starts one of them. So as
long as it is there, nothing has happened to the jobs since.

It is one JSON object: ``format`` (1), ``checksum`` (SHA-256 of the bytes of ``kept``), and ``kept``, which is
a ``Kept``. A file of format 1 is read by every later version. It is checked as a whole when it is read.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from gpuslice.checkpoint.files import flush_directory
from gpuslice.errors import GpusliceError
from gpuslice.sched_core.jobs.kept import KeptJobs
from gpuslice.types import ByteCount, Count, JobName, Label, PathText, RankNumber, UnixTime, Word, explain

FILE = "kept.json"
FORMAT = 1
_PARTIAL = FILE + ".part"


class KeptFileError(GpusliceError):
    """The file of kept jobs cannot be read. Nothing was changed."""

    exit_code = 4


class KeptSnapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest snapshot of a rank: its file, its bytes, and the checksum of its commit record.

    The record has the checksums of all else.
    """

    job: JobName
    rank: RankNumber
    file: PathText
    bytes: ByteCount
    record: Label


class Kept(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept.

    Attributes
    ----------
    version, core_version
        The gpuslice that wrote this.
    unix_s
        When.
    policy, devices
        What the scheduler had, for people.
    directory
        Where the snapshots are. Relative to the state directory if they are in it.
    snapshots, jobs
        The snapshots, and all else of the jobs.
    """

    version: Word
    core_version: Count
    unix_s: UnixTime
    policy: Word
    devices: tuple[Label, ...]
    directory: PathText = ""
    snapshots: tuple[KeptSnapshot, ...] = ()
    jobs: KeptJobs


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    checksum: str
    kept: msgspec.Raw


class _AnyFormat(msgspec.Struct, frozen=True):
    format: int


def write(directory: Path, kept: Kept) -> None:
    """Write the file into ``directory``, readable for this user alone. It is whole or not there.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    body = msgspec.json.encode(kept)
    data = msgspec.json.encode(_Envelope(FORMAT, checksum(body), msgspec.Raw(body)))
    partial = directory / _PARTIAL
    partial.unlink(missing_ok=True)
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, directory / FILE)
    finally:
        partial.unlink(missing_ok=True)
    flush_directory(directory)


def read(directory: Path) -> tuple[Kept, str] | None:
    """Return what is kept in ``directory``, and the checksum of its file. Return None if nothing is.

    Raises
    ------
    KeptFileError
        If the file is damaged, of a later format, or cannot be read.
    """
    path = directory / FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KeptFileError(f"cannot read {path}: {error.strerror}", "see to its permissions") from error
    try:
        if (found := msgspec.json.decode(data, type=_AnyFormat).format) != FORMAT:
            raise KeptFileError(
                f"{path} has format {found}, and this gpuslice reads format {FORMAT}",
                "use the version that wrote it, or a later one",
            )
        envelope = msgspec.json.decode(data, type=_Envelope)
        if checksum(bytes(envelope.kept)) != envelope.checksum:
            raise KeptFileError(f"{path} is damaged: its checksum is another one", _DAMAGED)
        return msgspec.json.decode(envelope.kept, type=Kept), envelope.checksum
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise KeptFileError(f"{path} is damaged: {explain(error)}", _DAMAGED) from error


def remove(directory: Path) -> None:
    """Remove the file: what it says is not true any more."""
    path = directory / FILE
    if path.exists():
        path.unlink()
        flush_directory(directory)


def checksum(data: bytes) -> str:
    """Return the SHA-256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


_DAMAGED = (
    "start the version of gpuslice that wrote it with the options that it had: its journal has all jobs"
)
