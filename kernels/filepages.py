"""Files in memory: their pages, huge ones where the kernel makes them, and mappings that use them as such.

A gibibyte of a file in pages of 4 KiB takes a new process some 100 ms to map, and its owner 300 ms to
remove; in huge pages both take a few milliseconds, and copies miss the processor's page tables less often.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpuslice.config import format_size
from gpuslice.errors import AddressSpaceError

from .host import HUGE_PAGE_BYTES, PAGE_BYTES, advise, collapse, view_address

_MADV_REMOVE = 9
_MAP_FIXED = 0x10
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
#: What is made at once; at the end of each the kernel may say that there are no more.
_PORTION_BYTES = 64 << 20
_MORE_ADDRESSES = "raise its limit on address space (`ulimit -v`), or the machine's vm.max_map_count"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p


def map_file(descriptor: int, nbytes: int, *, start: int = 0, writable: bool = False) -> memoryview:
    """Map a file at an address at which its huge pages fit; unmapped with the last view of it.

    Parameters
    ----------
    nbytes
        How much of it; touching what lies beyond its end kills the process.
    start
        From where on, a multiple of the page size.

    Raises
    ------
    AddressSpaceError
        If the process may map no more.
    OSError
        If it cannot be mapped.
    """
    with _enough_addresses(nbytes):
        return _map(descriptor, nbytes, start, writable=writable)


def no_address_space(nbytes: int) -> tuple[str, str]:
    """Message and remedy where the kernel gives a process no further addresses, whatever memory is free."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    limit = "" if limit_bytes == resource.RLIM_INFINITY else f": its limit is {format_size(limit_bytes)}"
    return f"this process can map no further {format_size(nbytes)}{limit}", _MORE_ADDRESSES


def anonymous(nbytes: int) -> memoryview:
    """Private memory that begins at a page; ``AddressSpaceError``."""
    with _enough_addresses(nbytes):
        return memoryview(mmap.mmap(-1, nbytes))


@contextmanager
def _enough_addresses(nbytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise AddressSpaceError(*no_address_space(nbytes)) from error


def _map(descriptor: int, nbytes: int, start: int, *, writable: bool) -> memoryview:
    rights = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    # Room to choose the address in; the file is put over it and goes with it.
    room = mmap.mmap(
        -1,
        nbytes + HUGE_PAGE_BYTES,
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
        prot=rights,
    )
    whole = memoryview(room)
    address = view_address(whole)
    skipped = (start - address) % HUGE_PAGE_BYTES
    placed = _libc.mmap(address + skipped, nbytes, rights, mmap.MAP_SHARED | _MAP_FIXED, descriptor, start)
    if placed != address + skipped:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping {nbytes} bytes failed: {os.strerror(number)}")
    return whole[skipped : skipped + nbytes]


def allocate(descriptor: int, start: int, nbytes: int) -> None:
    """Give a part of a file all its pages, huge ones as far as possible; what it has is kept.

    Raises
    ------
    OSError
        If there is no room; some pages may be there then.
    """
    # The first one alone, because where it fails none need be tried.
    position, portion = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES
    end = (start + nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    while position < end and _allocate_huge(descriptor, position, min(portion, end - position)):
        position, portion = position + portion, _PORTION_BYTES
    os.posix_fallocate(descriptor, start, nbytes)


def _allocate_huge(descriptor: int, start: int, nbytes: int) -> bool:
    """Whole huge pages for a part of a file; whether to go on with the next part."""
    for position in range(start, start + nbytes, HUGE_PAGE_BYTES):
        os.posix_fallocate(descriptor, position, PAGE_BYTES)  # nothing is made of nothing
    memory = map_file(descriptor, nbytes, start=start)
    # The last two are of some pages, for the moment.
    return collapse(view_address(memory), nbytes) in (0, errno.EAGAIN, errno.EBUSY)


def huge_pages_in(directory: Path) -> bool:
    """Whether files in ``directory`` get huge pages, by making one that has no name."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, HUGE_PAGE_BYTES)
            return _allocate_huge(descriptor, 0, HUGE_PAGE_BYTES)
        finally:
            os.close(descriptor)
    return False


def remove(memory: memoryview) -> None:
    """Free the pages of a mapped file, which reads as zeros there afterwards.

    Raises
    ------
    OSError
        If its file system cannot do that.
    """
    number = advise(view_address(memory), len(memory), _MADV_REMOVE)
    if number:
        raise OSError(number, f"madvise(MADV_REMOVE) failed: {os.strerror(number)}")
