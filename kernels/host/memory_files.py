"""Map files into memory, and report the limits of a process on mappings."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from gpuslice.config import format_size
from gpuslice.errors import AddressSpaceError

from .process_memory import advise, view_address

_MADV_REMOVE = 9
_MADV_DONTFORK = 10
_MAP_FIXED = 0x10
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_MORE_ADDRESSES = "raise its limit on address space (`ulimit -v`), or the machine's vm.max_map_count"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def map_file(descriptor: int, nbytes: int, *, writable: bool = False) -> memoryview:
    """Map the beginning of a file and return it. It is unmapped with the last view.

    Parameters
    ----------
    nbytes
        How much of it; touching what lies beyond its end kills the process.

    Raises
    ------
    AddressSpaceError
        If the process may map no more.
    OSError
        If it cannot be mapped.
    """
    rights = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    with _enough_addresses(nbytes):
        # The file is mapped over private memory: `mmap.mmap` would keep the descriptor open, and its locks.
        whole = _room(nbytes, rights)
        _put_over(whole, descriptor, rights, 0)
        return whole


@contextmanager
def _enough_addresses(nbytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise AddressSpaceError(*no_address_space(nbytes)) from error


def no_address_space(nbytes: int) -> tuple[str, str]:
    """Return message and remedy for a process that gets no more addresses, however much memory is free."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    limit = "" if limit_bytes == resource.RLIM_INFINITY else f": its limit is {format_size(limit_bytes)}"
    return f"this process can map no further {format_size(nbytes)}{limit}", _MORE_ADDRESSES


def _room(nbytes: int, rights: int) -> memoryview:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return memoryview(mmap.mmap(-1, nbytes, flags=flags, prot=rights))


def _put_over(view: memoryview, descriptor: int, rights: int, position: int) -> None:
    address, nbytes = view_address(view), len(view)
    if _libc.mmap(address, nbytes, rights, mmap.MAP_SHARED | _MAP_FIXED, descriptor, position) != address:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping {nbytes} bytes failed: {os.strerror(number)}")


def map_nothing(nbytes: int) -> memoryview:
    """Return private memory of which only written pages take room. `map_over` puts files into it.

    Raises
    ------
    AddressSpaceError
        If the process may map no more.
    """
    with _enough_addresses(nbytes):
        return _room(nbytes, mmap.PROT_READ | mmap.PROT_WRITE)


def map_over(view: memoryview, descriptor: int, position: int = 0) -> None:
    """Replace whole pages of a mapping by those of a file, read-only.

    What the pages held is lost. Forked children do not inherit these pages: they would keep the memory of a
    removed file.

    Raises
    ------
    AddressSpaceError
        If the process may have no more mappings.
    OSError
        If it cannot be mapped.
    """
    with _enough_addresses(len(view)):
        _put_over(view, descriptor, mmap.PROT_READ, position)
    advise(view_address(view), len(view), _MADV_DONTFORK)


def same_bytes(one: memoryview, other: memoryview) -> bool:
    """Return True if two views hold the same bytes. Other threads run meanwhile."""
    if len(one) != len(other):
        return False
    return not len(one) or _libc.memcmp(view_address(one), view_address(other), len(one)) == 0


def remove(memory: memoryview) -> None:
    """Free the pages of a mapped file. They read as zeros afterwards.

    Raises
    ------
    OSError
        If its file system cannot do that.
    """
    number = advise(view_address(memory), len(memory), _MADV_REMOVE)
    if number:
        raise OSError(number, f"madvise(MADV_REMOVE) failed: {os.strerror(number)}")
