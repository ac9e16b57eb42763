"""Copies between host storages and an arena: a few threads, chunk by chunk, inspected in the cache.

The threads live for one copy only, so none outlives a fork. The calling thread works with them. Whatever
interrupts it (Ctrl-C, say), it returns only when no thread touches the memory any more.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import TypeVar

from gpuslice.kernels.transfer import Inspector, Pairs, Transfer

from .process_memory import HugePages, address_space, view_address

#: Bytes inspected and copied at once. They stay in a core's share of the last cache, so the second look
#: is cheap. The size is far below that at which glibc's memcpy suffers from 4K aliasing.
CHUNK_BYTES = 4 << 20
#: More threads do not help: two or three saturate a socket's memory.
_MAX_THREADS = 8
#: For fewer bytes, releasing the GIL costs more than holding it.
_SMALL_BYTES = 64 << 10

_small_memmove = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.CDLL(None))
)

#: Host address, offset in the arena, bytes.
Piece = tuple[int, int, int]
_Work = TypeVar("_Work")


def copy_out(pairs: Pairs, arena: memoryview, inspect: Inspector | None, threads: int) -> Transfer:
    """Copy host storages into ``arena`` at their offsets, and return the statistics."""
    places = _pieces(pairs)
    base, memory = view_address(arena), address_space()
    declined: list[int] = []

    def copy(piece: Piece) -> None:
        address, offset, nbytes = piece
        if inspect is None or inspect(offset, memory[address : address + nbytes]):
            _move(base + offset, address, nbytes)
        else:
            declined.append(nbytes)

    run(_batches(places, len(arena)), copy, threads)
    return _by_host(places, sum(declined))


def copy_in(pairs: Pairs, arena: memoryview, inspect: Inspector | None, threads: int) -> Transfer:
    """Copy from ``arena`` into host storages, faulting in fresh pages, and return the statistics."""
    places = _pieces(pairs)
    pages = HugePages([(address, nbytes) for address, _, nbytes in places])
    base = view_address(arena)

    def copy(piece: Piece) -> None:
        address, offset, nbytes = piece
        if inspect is None or inspect(offset, arena[offset : offset + nbytes]):
            pages.collapse(address, nbytes)
            _move(address, base + offset, nbytes)

    run(_batches(places, len(arena)), copy, threads)
    return _by_host(places, 0)


def _by_host(places: Sequence[Piece], unchanged_bytes: int) -> Transfer:
    nbytes = sum(nbytes for _, _, nbytes in places)
    paths = {"host": nbytes - unchanged_bytes, "unchanged": unchanged_bytes}
    return Transfer({path: nbytes for path, nbytes in paths.items() if nbytes})


def _move(target: int, source: int, nbytes: int) -> None:
    (_small_memmove if nbytes < _SMALL_BYTES else ctypes.memmove)(target, source, nbytes)


def _pieces(pairs: Pairs) -> list[Piece]:
    """Return address, offset in the arena and bytes of each storage."""
    return [(storage.data_ptr(), offset, storage.nbytes()) for storage, offset in pairs]


def check(places: Iterable[tuple[int, int]], arena_bytes: int) -> None:
    """Raise ``ValueError`` if a storage, given by offset and bytes, does not lie inside the arena."""
    for offset, nbytes in places:
        if not 0 <= offset <= arena_bytes - nbytes:
            raise ValueError(f"a storage of {nbytes} bytes does not fit at {offset} of {arena_bytes} bytes")


def _batches(places: Sequence[Piece], arena_bytes: int) -> Iterator[list[Piece]]:
    """Yield batches of about equal size: large ranges chunk by chunk, small ones together."""
    batch: list[Piece] = []
    room = CHUNK_BYTES
    check(((offset, nbytes) for _, offset, nbytes in places), arena_bytes)
    for piece in places:
        address, offset, nbytes = piece
        if nbytes > CHUNK_BYTES:
            for start in range(0, nbytes, CHUNK_BYTES):
                yield [(address + start, offset + start, min(CHUNK_BYTES, nbytes - start))]
            continue
        batch.append(piece)
        room -= nbytes
        if room <= 0:
            yield batch
            batch, room = [], CHUNK_BYTES
    if batch:
        yield batch


def run(batches: Iterable[Sequence[_Work]], work: Callable[[_Work], None], threads: int) -> None:
    """Call ``work`` for all pieces, in the calling thread and ``threads - 1`` others. Wait for all.

    Raises
    ------
    BaseException
        The first failure, of whichever thread. Then, too, none of them is at work any more.
    """
    # Listed first: the iterator checks the places, before anything is written.
    todo = list(batches)

    def work_through(batch: Sequence[_Work]) -> None:
        for piece in batch:
            work(piece)

    with copy_threads(work_through, min(threads, len(todo))) as submit:
        for batch in todo:
            submit(batch)


@contextmanager
def copy_threads(work: Callable[[_Work], None], threads: int) -> Iterator[Callable[[_Work], None]]:
    """Yield a function that hands one piece to worker threads. The block ends when all pieces are done.

    Raises
    ------
    BaseException
        The first failure, of the block or of a thread. Then, too, none of them is at work any more.
    """
    pieces: SimpleQueue[tuple[_Work] | None] = SimpleQueue()
    failures: list[BaseException] = []

    def worker_loop() -> None:
        while (given := pieces.get()) is not None:
            if not failures:
                try:
                    work(*given)
                except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
                    failures.append(error)
        pieces.put(None)  # for the next one

    workers = [
        threading.Thread(target=worker_loop, name=f"gpuslice-copy-{number}", daemon=True)
        for number in range(1, min(threads, _MAX_THREADS))
    ]
    try:
        with suppress(RuntimeError):  # the system gives no more threads; fewer do the work, too
            for thread in workers:
                thread.start()
        yield lambda piece: pieces.put((piece,))
    except BaseException as error:  # noqa: BLE001 - raised below, when the others have stopped
        failures.append(error)
    while True:
        try:
            pieces.put(None)
            worker_loop()  # the caller's thread, too
            for thread in workers:
                # Without an ident it has not begun. If it still will (its start was interrupted, which is a
                # failure noted by now), it sees the failure before it touches anything.
                if thread.ident is not None:
                    thread.join()
            break
        except BaseException as error:  # noqa: BLE001 - raised below, when the others have stopped
            failures.append(error)
    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()  # or the exception would keep its frames alive, and what they refer to
