"""What is equal on several ranks of a job, kept once: pieces of their snapshots as files with several names.

A piece is a file beside the slot, named by the checksum of its bytes. Who needs a piece looks for that name
in the other ranks' stores. If the bytes are the same, all of them, it takes the file under a name of its own
(a hard link); otherwise it writes a file. So the number of a file's names says how many snapshots need it:
the kernel keeps count, whoever dies. A file that is being written ends in ``.part`` and is locked by its
writer; the others wait for it, and write their own if its writer dies or takes too long.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import MutableSet, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from gpuslice.checkpoint.files import flush, open_checked, write_at
from gpuslice.checkpoint.format.checksums import ChecksumRecorder, fingerprint
from gpuslice.checkpoint.format.layout import Placement
from gpuslice.checkpoint.format.pieces import KEY_BYTES, Piece, piece_ranges
from gpuslice.checkpoint.format.reader import piece_path
from gpuslice.errors import RamDiskFullError, SnapshotError
from gpuslice.kernels.host.memory_files import map_file, map_nothing, map_over, same_bytes
from gpuslice.kernels.transfer import Inspector

from .budget import Budget, Own
from .slots import remove_pieces

_PARTIAL = ".part"
_RESERVED = "reserved"
#: A writer needs about a millisecond for a piece. One that is stopped is not waited for longer than this.
_PATIENCE_S = 5.0
_LOOK_AGAIN_S = 0.001
#: Room is asked for in steps: asking counts all files of the RAM disk.
_STEPS = 16
_MOST_AT_ONCE_BYTES = 256 << 20


def piece_key(checksum: int) -> int:
    """The number by which the file of a piece with this XXH3-128 goes, if no other has it."""
    return checksum


class SharedPieces:
    """The pieces of one snapshot on its way into a slot.

    Parameters
    ----------
    slot
        The slot's file; the pieces lie beside it.
    others
        The files of all other slots that may have the same pieces: of the other ranks, and this one's other.
    own
        Gives up what this store needs less than room for the pieces.

    Attributes
    ----------
    memory
        The snapshot's file up to its tail: what has not been put yet is this process's own memory.
    shared_bytes
        Of what was put, bytes that were there already.
    """

    def __init__(
        self, slot: Path, others: Sequence[Path], budget: Budget, placement: Placement, own: Own
    ) -> None:
        self._slot = slot
        self._others = tuple(others)
        self._budget = budget
        self._ranges = piece_ranges(placement)
        chunks = set(placement.chunks)
        #: Those that are copied and checksummed as one: of small storages, only the few that are a piece.
        self._chunks = {piece[0]: index for index, piece in enumerate(self._ranges) if piece in chunks}
        self._keys: list[bytes | None] = [None] * len(self._ranges)
        self._mutex = threading.Lock()
        nbytes = sum(stop - start for start, stop in self._ranges)
        self._room = _Room(slot.with_name(f"{slot.stem}.{_RESERVED}"), budget, nbytes, own)
        self.memory = map_nothing(placement.end)
        self.shared_bytes = 0

    def inspector(self, checksums: ChecksumRecorder | None) -> Inspector:
        """Sees the chunks of a copy; those that are pieces are put, and need not be copied any more.

        ``checksums`` notes what it sees.
        """

        def inspect(offset: int, data: memoryview) -> bool:
            if checksums is not None:
                checksums(offset, data)
            index = self._chunks.get(offset)
            if index is None:
                return True
            if checksums is None:
                self._put(index, data, self._checksum(index, data))
            else:
                self._put(index, data, checksums.sum_at(offset))
            return False

        return inspect

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """Which pieces neither the slot has nor another one; those that are found are put.

        What else the slot has goes, and makes room. ``keys`` are the XXH3-128 of all pieces.
        """
        remove_pieces(self._slot, {piece_path(self._slot, key).name for key in keys})
        return [index for index, key in enumerate(keys) if not self._put_found(index, key)]

    def _put_found(self, index: int, key: bytes) -> bool:
        start, stop = self._ranges[index]
        paths = [piece_path(one, key) for one in (self._slot, *self._others)]
        found = _first(paths[0], paths[1:], stop - start, frozenset())
        if found is None:
            return False
        try:
            if os.fstat(found.descriptor).st_size != stop - start:
                return False
            data = map_file(found.descriptor, stop - start)
        finally:
            os.close(found.descriptor)
        if fingerprint(data) != key:
            return False
        self._put(index, data, int.from_bytes(key))
        return True

    def put(self, index: int, data: memoryview) -> None:
        """Put a piece that comes from elsewhere."""
        self._put(index, data, self._checksum(index, data))

    def complete(self) -> list[Piece]:
        """Put what has not been put, from `memory`, and give the room back that was not needed."""
        for index, (start, stop) in enumerate(self._ranges):
            if self._keys[index] is None:
                data = self.memory[start:stop]
                self._put(index, data, self._checksum(index, data))
        self._room.close()
        named = zip(self._keys, self._ranges, strict=True)
        return [Piece(key, *where) for key, where in named if key is not None]

    def close(self) -> None:
        """Give the room back that was not needed."""
        self._room.close()

    def _checksum(self, index: int, data: memoryview) -> int:
        start, stop = self._ranges[index]
        whole = data if len(data) == stop - start else bytes(data).ljust(stop - start, b"\0")
        return int.from_bytes(fingerprint(whole))

    def _put(self, index: int, data: memoryview, checksum: int) -> None:
        """Have a file with these bytes and zeros behind them, and put it where they belong in `memory`."""
        start, stop = self._ranges[index]
        key = piece_key(checksum)
        with self._budget.taking(stop - start):
            while (descriptor := self._file_of(key, data, stop - start)) is None:
                key = (key + 1) % (1 << 8 * KEY_BYTES)
        try:
            map_over(self.memory[start:stop], descriptor)
        finally:
            os.close(descriptor)
        self._keys[index] = key.to_bytes(KEY_BYTES)

    def _file_of(self, key: int, data: memoryview, nbytes: int) -> int | None:
        """The open file of these bytes, by that key this slot's; ``None`` if it has another one by it."""
        name = key.to_bytes(KEY_BYTES)
        mine, theirs = piece_path(self._slot, name), [piece_path(one, name) for one in self._others]
        different: set[int] = set()  # inodes
        overdue: set[Path] = set()
        while True:
            found, busy = self._look(mine, theirs, nbytes, different, overdue)
            if busy is None and found is None:
                found, busy = self._begin(mine, theirs, nbytes, different, overdue)
                if found is None and busy is None:
                    continue  # there was no room yet
            if busy is not None:
                _await(busy, overdue, limited=busy != mine)
            elif found is not None and found.new:
                if self._fill(found.descriptor, mine, data):
                    return found.descriptor
            elif found is not None:
                if _holds(found.descriptor, data, nbytes) and (found.path == mine or _link(found, mine)):
                    self._note_shared(nbytes)
                    return found.descriptor
                different.add(os.fstat(found.descriptor).st_ino)
                os.close(found.descriptor)
                if found.path == mine:
                    return None

    def _look(
        self, mine: Path, theirs: Sequence[Path], nbytes: int, different: Set[int], overdue: Set[Path]
    ) -> tuple[_Found | None, Path | None]:
        """A file that may be the piece, or where somebody is writing one right now."""
        for path in (mine, *theirs):
            if path not in overdue and _is_filled(path):
                return None, path
        return _first(mine, theirs, nbytes, different), None

    def _begin(
        self, mine: Path, theirs: Sequence[Path], nbytes: int, different: Set[int], overdue: Set[Path]
    ) -> tuple[_Found | None, Path | None]:
        """As `_look`, but if there is nothing now either, a new file; nothing if there was no room yet.

        Under the RAM disk's lock, so that of all ranks that look one begins.
        """
        with self._mutex:
            with self._budget.lock():
                found, busy = self._look(mine, theirs, nbytes, different, overdue)
                if found is not None or busy is not None:
                    return found, busy
                if self._room.left_bytes >= nbytes:
                    descriptor = _new(mine, nbytes)
                    self._room.take(nbytes)
                    return _Found(mine, descriptor, new=True), None
            self._room.extend(nbytes)
        return None, None

    def _note_shared(self, nbytes: int) -> None:
        with self._mutex:
            self.shared_bytes += nbytes

    def _fill(self, descriptor: int, path: Path, data: memoryview) -> bool:
        """Write a new piece and give it its name; not if another one has got it meanwhile."""
        partial = _partial(path)
        try:
            write_at(descriptor, data, 0)
            flush(descriptor)
            named = _link(_Found(partial, descriptor, new=True), path)
            partial.unlink()
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        except BaseException:
            partial.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        if not named:
            os.close(descriptor)
        return named


class _Found(NamedTuple):
    """An open file that may be a piece, or shall become one."""

    path: Path
    descriptor: int
    new: bool = False


class _Room:
    """Bytes that were admitted and have no file yet: a file without pages that counts with its length."""

    def __init__(self, path: Path, budget: Budget, wanted_bytes: int, own: Own) -> None:
        self._path = path
        self._budget = budget
        self._step_bytes = min(wanted_bytes // _STEPS, _MOST_AT_ONCE_BYTES)
        self._own = own
        self._descriptor = -1
        self.left_bytes = 0

    def extend(self, nbytes: int) -> None:
        """Have room for so many bytes, and some more if there is; ``RamDiskFullError``."""
        if self._descriptor < 0:
            self._descriptor = open_checked(self._path, os.O_RDWR | os.O_CREAT)
        try:
            self._admit(max(nbytes, self._step_bytes), None)
        except RamDiskFullError:
            self._admit(nbytes, self._own)

    def _admit(self, nbytes: int, own: Own | None) -> None:
        self.left_bytes = self._budget.extend(self._descriptor, nbytes, allocated_bytes=nbytes, own=own)

    def take(self, nbytes: int) -> None:
        """Room for so many bytes is used now; under the RAM disk's lock, so that none counts twice."""
        self.left_bytes -= nbytes
        os.ftruncate(self._descriptor, self.left_bytes)

    def close(self) -> None:
        """Give back what is left."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor, self.left_bytes = -1, 0


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}{_PARTIAL}")


def _new(path: Path, nbytes: int) -> int:
    """A new file for a piece, locked by this process; with the RAM disk's lock held."""
    partial = _partial(path)
    partial.unlink(missing_ok=True)  # of a writer that failed
    descriptor = open_checked(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, nbytes)
    except BaseException:
        partial.unlink(missing_ok=True)
        os.close(descriptor)
        raise
    return descriptor


def _is_filled(path: Path) -> bool:
    """Whether somebody is writing that piece there right now."""
    try:
        descriptor = open_checked(_partial(path))
    except (FileNotFoundError, SnapshotError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _await(path: Path, overdue: MutableSet[Path], *, limited: bool) -> None:
    """Wait until a piece is written, or its writer has died; if ``limited``, not for ever: that is noted."""
    ends_s = time.monotonic() + _PATIENCE_S
    while _is_filled(path):
        if limited and time.monotonic() > ends_s:
            overdue.add(path)
            return
        time.sleep(_LOOK_AGAIN_S)


def _first(mine: Path, theirs: Sequence[Path], nbytes: int, different: Set[int]) -> _Found | None:
    """The first of these that is there, opened: this slot's own, whatever it holds, or one that may do."""
    for path in (mine, *theirs):
        try:
            descriptor = open_checked(path)
        except (FileNotFoundError, SnapshotError):
            continue
        status = os.fstat(descriptor)
        if path == mine or (status.st_size == nbytes and status.st_ino not in different):
            return _Found(path, descriptor)
        os.close(descriptor)
    return None


def _holds(descriptor: int, data: memoryview, nbytes: int) -> bool:
    """Whether the file is these bytes and zeros behind them: every byte is compared."""
    if os.fstat(descriptor).st_size != nbytes:
        return False
    memory = map_file(descriptor, nbytes)
    rest = bytes(memory[len(data) :])
    return same_bytes(memory[: len(data)], data) and not any(rest)


def _link(found: _Found, path: Path) -> bool:
    """Give the open file another name; not if it has none or too many, or if another file has that name."""
    # By its descriptor, so that it is the very file that was looked at.
    files = os.open("/proc/self/fd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(str(found.descriptor), path, src_dir_fd=files, follow_symlinks=True)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EEXIST, errno.EMLINK):
            return False
        raise
    finally:
        os.close(files)
    return True
