"""Keep once what is equal on several ranks: pieces of their snapshots are files with several names.

A piece is a file beside the slot, named by the checksum of its bytes. A rank that needs a piece looks for
that name in the other ranks' stores. If all bytes are the same, it makes a hard link to the file; otherwise
it writes a new file. So the kernel counts how many snapshots need the file, whichever process dies. The
writer locks a file while writing, and the others wait. If the writer died, the bytes differ, and the others
write their own.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Container, Sequence
from contextlib import suppress
from pathlib import Path

from gpuslice.checkpoint.files import open_checked, write_at
from gpuslice.checkpoint.format.checksums import ChecksumRecorder, fingerprint
from gpuslice.checkpoint.format.layout import Placement
from gpuslice.checkpoint.format.pieces import KEY_BYTES, Piece, piece_ranges
from gpuslice.checkpoint.format.reader import piece_path
from gpuslice.errors import RamDiskFullError, SnapshotError
from gpuslice.kernels.host.memory_files import map_file, map_nothing, map_over, same_bytes
from gpuslice.kernels.transfer import Inspector

from .budget import Budget, Own
from .slots import pieces_of, remove_pieces

_RESERVED = "reserved"
#: Room is reserved in steps, because each request counts all files of the RAM disk.
_STEPS = 16
_MOST_AT_ONCE_BYTES = 256 << 20


class SharedPieces:
    """The pieces of one snapshot that is being written into a slot.

    Parameters
    ----------
    slot
        The slot's file; the pieces lie beside it.
    others
        The files of all other slots that may have the same pieces: of the other ranks, and this one's other.
    own
        Frees what this store needs less than room for the pieces.

    Attributes
    ----------
    memory
        The snapshot's file up to its tail: what has not been put yet is this process's own memory.
    shared_bytes
        Bytes of put pieces that were there already.
    """

    def __init__(
        self, slot: Path, others: Sequence[Path], budget: Budget, placement: Placement, own: Own
    ) -> None:
        self._slot = slot
        self._others = tuple(others)
        self._budget = budget
        self._ranges = piece_ranges(placement)
        chunks = set(placement.chunks)
        #: Pieces that are also chunks, by offset. Few pieces of small storages are.
        self._chunks = {piece[0]: index for index, piece in enumerate(self._ranges) if piece in chunks}
        self._keys: list[bytes | None] = [None] * len(self._ranges)
        self._mutex = threading.Lock()
        nbytes = sum(stop - start for start, stop in self._ranges)
        self._room = _Room(slot.with_name(f"{slot.stem}.{_RESERVED}"), budget, nbytes, own)
        self.memory = map_nothing(placement.end)
        self.shared_bytes = 0

    def inspector(self, checksums: ChecksumRecorder | None) -> Inspector:
        """Return an inspector that puts chunks that are pieces, and gives ``checksums`` all chunks."""

        def inspect(offset: int, data: memoryview) -> bool:
            if checksums is not None:
                checksums(offset, data)
            index = self._chunks.get(offset)
            if index is None:
                return True
            self.put(index, data, None if checksums is None else checksums.sum_at(offset))
            return False

        return inspect

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """Return the numbers of the pieces that no slot has. Pieces that are found are put into the snapshot.

        Other files of the slot are removed, which makes room. ``keys`` are the XXH3-128 of all pieces.
        """
        remove_pieces(self._slot, {piece_path(self._slot, key).name for key in keys})
        there = _by_key((self._slot, *self._others))
        return [
            index
            for index, key in enumerate(keys)
            if not self._put_found(index, key, there.get(key.hex(), ()))
        ]

    def _put_found(self, index: int, key: bytes, paths: Sequence[Path]) -> bool:
        start, stop = self._ranges[index]
        for path in paths:
            descriptor = _opened(path)
            if descriptor is None:
                continue
            try:
                _await(descriptor)
                right_length = os.fstat(descriptor).st_size == stop - start
                data = map_file(descriptor, stop - start) if right_length else memoryview(b"")
            finally:
                os.close(descriptor)
            if fingerprint(data) == key:
                self.put(index, data, int.from_bytes(key))
                return True
            if path == piece_path(self._slot, key):
                path.unlink()  # its writer died
        return False

    def complete(self) -> list[Piece]:
        """Put all remaining pieces from `memory`, release unused room, and return the pieces."""
        for index, (start, stop) in enumerate(self._ranges):
            if self._keys[index] is None:
                self.put(index, self.memory[start:stop])
        self._room.close()
        named = zip(self._keys, self._ranges, strict=True)
        return [Piece(key, *where) for key, where in named if key is not None]

    def close(self) -> None:
        """Release the unused room."""
        self._room.close()

    def put(self, index: int, data: memoryview, checksum: int | None = None) -> None:
        """Provide a file with these bytes, padded with zeros, and map it at its place in `memory`.

        ``checksum`` is the XXH3-128 of the whole piece, if it is known.
        """
        start, stop = self._ranges[index]
        if checksum is None:
            checksum = int.from_bytes(fingerprint(bytes(data).ljust(stop - start, b"\0")))
        key = checksum.to_bytes(KEY_BYTES)
        with self._budget.taking(stop - start):
            while (descriptor := self._file_of(key, data, stop - start)) is None:
                checksum = (checksum + 1) % (1 << 8 * KEY_BYTES)
                key = checksum.to_bytes(KEY_BYTES)
        try:
            map_over(self.memory[start:stop], descriptor)
        finally:
            os.close(descriptor)
        self._keys[index] = key

    def _file_of(self, key: bytes, data: memoryview, nbytes: int) -> int | None:
        """Return this slot's open file of these bytes under that key; None if other bytes have the key."""
        mine, *theirs = (piece_path(slot, key) for slot in (self._slot, *self._others))
        different: set[int] = set()  # inodes
        while True:
            path, descriptor = self._open([mine, *theirs], nbytes, different)
            try:
                if path is None:
                    _fill(descriptor, mine, data)
                    return descriptor
                _await(descriptor)
                same = _holds(descriptor, data, nbytes)
                with self._mutex:  # no other thread creates that file meanwhile
                    if same and (path == mine or _link(descriptor, mine)):
                        self.shared_bytes += nbytes
                        return descriptor
                different.add(os.fstat(descriptor).st_ino)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            if path == mine:
                return None

    def _open(self, paths: Sequence[Path], nbytes: int, different: Container[int]) -> tuple[Path | None, int]:
        """Return path and descriptor of the first file that may be the piece. Else create one: no path.

        The RAM disk's lock is held, so that only one of several ranks creates it.
        """
        while True:
            with self._mutex, self._budget.lock():
                for path in paths:
                    descriptor = _opened(path, () if path == paths[0] else different)
                    if descriptor is not None:
                        return path, descriptor
                if self._room.left_bytes >= nbytes:
                    descriptor = _new(paths[0], nbytes)
                    self._room.take(nbytes)
                    return None, descriptor
            with self._mutex:
                self._room.extend(nbytes)


class _Room:
    """Bytes that were admitted before their files exist, kept as the length of an empty file."""

    def __init__(self, path: Path, budget: Budget, wanted_bytes: int, own: Own) -> None:
        self._path = path
        self._budget = budget
        self._step_bytes = min(wanted_bytes // _STEPS, _MOST_AT_ONCE_BYTES)
        self._own = own
        self._descriptor = -1
        self.left_bytes = 0

    def extend(self, nbytes: int) -> None:
        """Reserve room for ``nbytes``, and some more if possible. Raises ``RamDiskFullError``."""
        if self._descriptor < 0:
            self._descriptor = open_checked(self._path, os.O_RDWR | os.O_CREAT)
        try:
            self._admit(max(nbytes, self._step_bytes), None)
        except RamDiskFullError:
            self._admit(nbytes, self._own)

    def _admit(self, nbytes: int, own: Own | None) -> None:
        self.left_bytes = self._budget.extend(self._descriptor, nbytes, allocated_bytes=nbytes, own=own)

    def take(self, nbytes: int) -> None:
        """Use ``nbytes`` of the room. The RAM disk's lock is held, so that no byte counts twice."""
        self.left_bytes -= nbytes
        os.ftruncate(self._descriptor, self.left_bytes)

    def close(self) -> None:
        """Release the rest."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor, self.left_bytes = -1, 0


def _by_key(slots: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the pieces beside these slots' files, by the digits in their names."""
    found: dict[str, list[Path]] = {}
    for slot in slots:
        with suppress(FileNotFoundError):  # a rank that has no store yet
            for path in pieces_of(slot):
                found.setdefault(path.suffix[1:], []).append(path)
    return found


def _await(descriptor: int) -> None:
    """Wait until an open piece is written, or its writer has died."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a mapping would keep the lock


def _opened(path: Path, different: Container[int] = ()) -> int | None:
    """Return the open file; None if there is none, or if its inode is in ``different``."""
    try:
        descriptor = open_checked(path)
    except (FileNotFoundError, SnapshotError):
        return None
    if os.fstat(descriptor).st_ino in different:
        os.close(descriptor)
        return None
    return descriptor


def _new(path: Path, nbytes: int) -> int:
    """Create a file for a piece and lock it. The caller holds the RAM disk's lock."""
    descriptor = open_checked(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.ftruncate(descriptor, nbytes)
    return descriptor


def _fill(descriptor: int, path: Path, data: memoryview) -> None:
    """Write a new piece, and unlock it for the others."""
    try:
        write_at(descriptor, data, 0)
        os.fsync(descriptor)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def _holds(descriptor: int, data: memoryview, nbytes: int) -> bool:
    """Return True if the file is these bytes, padded with zeros. Every byte is compared."""
    if os.fstat(descriptor).st_size != nbytes:
        return False
    memory = map_file(descriptor, nbytes)
    rest = bytes(memory[len(data) :])
    return same_bytes(memory[: len(data)], data) and not any(rest)


def _link(descriptor: int, path: Path) -> bool:
    """Give the open file another name. Return False if it has none or too many, or the name is taken."""
    # By its descriptor, so that it is the file that was compared.
    files = os.open("/proc/self/fd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(str(descriptor), path, src_dir_fd=files, follow_symlinks=True)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EEXIST, errno.EMLINK):
            return False
        raise
    finally:
        os.close(files)
    return True
