"""Open, check and read a snapshot that lies in a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from gpuslice.checkpoint.discover import heap
from gpuslice.checkpoint.files import open_checked, read_at
from gpuslice.errors import CorruptSnapshotError, RefusedSnapshotError, SnapshotError, UsageError
from gpuslice.kernels.host.memory_files import map_file, map_nothing, map_over

from .checksums import ChecksumVerifier, Digests, chunk_digests, fingerprint, unpack_digests
from .gsnp import RECORD_BYTES, Metadata, Record
from .layout import CHUNK_BYTES
from .pieces import FileParts, Piece, check_pieces
from .safetensors_header import PREAMBLE_BYTES, Content, decode_preamble

#: Chunks between two calls of ``pause`` in a check: some hundredths of a second.
_CHUNKS_AT_ONCE = 32
#: Remedy for a damaged snapshot.
DAMAGED = "use another snapshot; this one cannot be restored"
_PIECE_REMEDY = "copy all files of its directory, or `gpuslice ramdisk export` it"
_MISSING = "`gpuslice ramdisk ls` lists the jobs that have one"


class SnapshotFile:
    """An opened snapshot whose structure was checked; made by `open_snapshot` or a writer.

    The payload is checked when it is used: by `view`, storage by storage, or all at once by `verify`. Closing
    the snapshot, also as a context manager, drops the mapping; views that are still held stay valid.

    Attributes
    ----------
    path
        The file.
    record
        Its commit record.
    generation
        Grows by one with every snapshot of a store.
    boundary
        The mini-batch boundary at which it was taken.
    restartable
        True if another process can continue from it.
    content
        Its storages and tensors.
    storages, tensors
        In the writer's order.
    offsets
        Where each storage begins in `arena`.
    nbytes
        Bytes of all storages.
    tree
        Everything that is not a tensor; `tree.decode` reads it.
    digests
        The checksum of every chunk of `content`'s placement.
    """

    def __init__(
        self,
        path: Path,
        record: Record,
        content: Content,
        tree: bytes,
        digests: Digests,
        memory: memoryview,
    ) -> None:
        self.path = path
        self.record = record
        self.generation, self.boundary = record.generation, record.boundary
        self.restartable = record.restartable
        self.content = content
        self.storages, self.tensors = content.layout.storages, content.tensors
        self.offsets, self.nbytes = content.placement.offsets, content.layout.nbytes
        self.tree = tree
        self.digests = digests
        self._memory: memoryview | None = memory.toreadonly()

    @property
    def closed(self) -> bool:
        """True if the snapshot was closed."""
        return self._memory is None

    def view(self, sid: int) -> memoryview:
        """Return the bytes of storage ``sid``, read-only. They are compared with their checksums.

        Raises
        ------
        CorruptSnapshotError
            If they are not what was written; names the storage.
        """
        nbytes, offset = self.storages[sid].nbytes, self.offsets[sid]
        if nbytes:
            first = self.content.placement.chunk_at[offset]
            self._compare(first, first - (-nbytes // CHUNK_BYTES))
        return self.arena[offset : offset + nbytes]

    @property
    def arena(self) -> memoryview:
        """The whole file, read-only, as a copy needs it."""
        if self._memory is None:
            raise UsageError(
                f"the snapshot {self.path} (generation {self.generation}) is closed or was overwritten",
                "open the store's newest snapshot",
            )
        return self._memory

    def verifier(self) -> ChecksumVerifier:
        """Return an inspector for a copy out of `arena`. ``CorruptSnapshotError`` names a damaged storage."""
        return ChecksumVerifier(self.arena, self.content.placement, self.digests, corrupt=self._corrupt_at)

    def verify(self, pause: Callable[[], object] | None = None) -> None:
        """Check every byte of the payload.

        Parameters
        ----------
        pause
            Called now and then; an exception from it ends the check.

        Raises
        ------
        CorruptSnapshotError
            Naming the first storage whose bytes differ from those that were written.
        """
        if pause is None:  # small ones together are worth a second thread
            self._compare(0, self.record.chunks)
            return
        for first in range(0, self.record.chunks, _CHUNKS_AT_ONCE):
            pause()
            self._compare(first, first + _CHUNKS_AT_ONCE)

    def _compare(self, first: int, stop: int) -> None:
        """Check chunks ``first`` to ``stop - 1``."""
        ranges = self.content.placement.chunks[first:stop]
        found = chunk_digests(self.arena, ranges)
        for (offset, _), value, expected in zip(ranges, found, self.digests[first:stop], strict=True):
            if value != expected:
                raise self._corrupt_at(offset)

    def _corrupt_at(self, offset: int) -> CorruptSnapshotError:
        """Return the error for the storage whose chunk begins at ``offset``."""
        sizes = self.content.layout.sizes
        for sid, (start, nbytes) in enumerate(zip(self.offsets, sizes, strict=True)):
            if start <= offset < start + nbytes:
                label = self.storages[sid].label
                name = f"storage {sid} ({label})" if label else f"storage {sid}"
                return CorruptSnapshotError(f"{self.path}: {name} is damaged", DAMAGED)
        return CorruptSnapshotError(f"{self.path}: the bytes at {offset} are damaged", DAMAGED)

    def close(self) -> None:
        """Drop the mapping."""
        self._memory = None

    def attach(self, memory: memoryview) -> None:
        """Read from ``memory`` from now on: another mapping of the same bytes, which is not checked again."""
        self._memory = memory.toreadonly()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_snapshot(path: Path) -> SnapshotFile:
    """Open a snapshot file of any origin and check its structure.

    Raises
    ------
    CorruptSnapshotError
        If it is not exactly in the form that a writer of GSNP/2 gives it.
    RefusedSnapshotError
        If it is missing, a link, foreign, writable by others, or of another version.
    AddressSpaceError
        If this process may not map as much.
    """
    with _opened(path, f"there is no snapshot {path}", _MISSING) as descriptor:
        return read_snapshot(descriptor, path)


def read_snapshot(descriptor: int, path: Path) -> SnapshotFile:
    """Read a snapshot from an open file that belongs at ``path``. Otherwise like `open_snapshot`."""
    with _naming(path), heap.uncollected():
        record, parts = _read_record(descriptor)
        content, tree, digests = read_description(parts.read, record)
        if parts.cut_bytes:
            memory = map_pieces(path, descriptor, record, check_pieces(parts.keys, content.placement))
        else:
            memory = map_file(descriptor, record.file_len)
        return SnapshotFile(path, record, content, tree, digests, memory)


def record_of(path: Path) -> Record:
    """Return the record of a snapshot file; nothing else is read. Raises like `open_snapshot`."""
    with _opened(path, f"there is no snapshot {path}", _MISSING) as descriptor, _naming(path):
        return _read_record(descriptor)[0]


@contextmanager
def _opened(path: Path, missing: str, remedy: str) -> Iterator[int]:
    try:
        descriptor = open_checked(path)
    except FileNotFoundError as error:
        raise RefusedSnapshotError(missing, remedy) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Run the block, and add the file's name to errors that it raises."""
    try:
        yield
    except SnapshotError as error:
        raise type(error)(f"{path}: {error.message}", error.remedy or DAMAGED) from error
    except OSError as error:
        raise RefusedSnapshotError(f"cannot read {path}: {error.strerror}", DAMAGED) from error


def _read_record(descriptor: int) -> tuple[Record, FileParts]:
    """Return the record of an open snapshot file, checked against the file, and the file's parts."""
    payload, position = decode_preamble(read_at(descriptor, PREAMBLE_BYTES, 0))
    parts = FileParts(descriptor, payload)
    if position + RECORD_BYTES > parts.length:
        raise CorruptSnapshotError(f"the file has {parts.length} bytes: it was truncated")
    record = Record.decode(parts.read(RECORD_BYTES, position))
    if (record.payload, record.position, record.file_len) != (payload, position, parts.length):
        raise CorruptSnapshotError(
            f"its record is about a file of {record.file_len} bytes, not {parts.length}"
        )
    if parts.cut_bytes not in (0, record.tail - record.payload):
        raise CorruptSnapshotError(f"{parts.cut_bytes} bytes were cut out of it, which is not its payload")
    return record, parts


def map_pieces(path: Path, descriptor: int, record: Record, pieces: Sequence[Piece]) -> memoryview:
    """Return the whole file, mapped from its open rest and its pieces beside it. Nothing is copied."""
    memory = map_nothing(record.file_len)
    map_over(memory[: record.payload], descriptor)
    map_over(memory[record.tail :], descriptor, record.payload)
    for piece in pieces:
        name = piece_path(path, piece.key)
        with _opened(name, f"its piece {name.name} is not beside it", _PIECE_REMEDY) as opened:
            if os.fstat(opened).st_size != piece.stop - piece.start:
                raise CorruptSnapshotError(f"its piece {piece.key.hex()} has another length")
            map_over(memory[piece.start : piece.stop], opened)
    return memory.toreadonly()


def piece_path(path: Path, key: bytes) -> Path:
    """Return the path of a piece of a slot's snapshot, given its key."""
    return path.with_name(f"{path.stem}.{key.hex()}")


def read_description(read: Callable[[int, int], bytes], record: Record) -> tuple[Content, bytes, Digests]:
    """Return content, tree and digests, from checked private copies of header, metadata and table.

    Parameters
    ----------
    read
        Returns bytes of the whole file, given length and position; never asked for the payload.

    Raises
    ------
    CorruptSnapshotError
        If they are not in the form that a writer of GSNP/2 gives them.
    """
    header = read(record.payload, 0)
    data = read(record.table - record.tail, record.tail)
    table = read(record.position - record.table, record.table)
    for name, part, expected in (
        ("header", header, record.header_xxh3),
        ("metadata", data, record.metadata_xxh3),
        ("checksum table", table, record.table_xxh3),
    ):
        if fingerprint(part) != expected:
            raise CorruptSnapshotError(f"its {name} is damaged")
    metadata = Metadata.decode(data[: record.metadata_len])
    digests = unpack_digests(table, record.chunks)
    return _content(record, metadata, header), bytes(metadata.tree), digests


def _content(record: Record, metadata: Metadata, header: bytes) -> Content:
    """Return the content if all parts fit together as a writer makes them: checksums cannot tell that."""
    sizes = [row.nbytes for row in metadata.storages]
    if min(sizes, default=0) < 0 or sum(sizes) > record.tail - record.payload:
        raise CorruptSnapshotError("a storage has an absurd size")
    try:
        content = Content.build(metadata.layout, record.payload, metadata.tensors)
    except UsageError as error:
        raise CorruptSnapshotError(error.message) from error
    if (
        content.placement.end != record.tail
        or content.rows != metadata.storages
        or len(content.rows) != record.storages
        or content.placement.chunk_total != record.chunks
    ):
        raise CorruptSnapshotError("its storages are not where they belong")
    if content.header(record) != header:
        raise CorruptSnapshotError("its safetensors header does not describe its content")
    return content
