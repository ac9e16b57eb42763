"""Which memory nobody has written to: Linux keeps the books, by page, whoever writes and however.

Userfaultfd can protect memory from writes without anybody being told of them (Linux 6.7,
``UFFD_FEATURE_WP_ASYNC``): the first write to a page takes its protection away, and ``PAGEMAP_SCAN`` says
which pages still have it. That sees what NumPy, C extensions and system calls write, at no cost for memory
that is not written; the first write to a protected page costs a page fault.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import struct
import weakref
from collections.abc import Iterator
from contextlib import suppress
from fcntl import ioctl
from typing import Any

import numpy as np

from .host import HUGE_PAGE_BYTES, PAGE_BYTES

#: Linux has no function of the C library for it.
_SYSTEM_CALL = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1
_API_VERSION = 0xAA
_FEATURE_WP_ASYNC = 1 << 15
_MODE_WP = 2
_PROTECTED = 1
_UFFDIO_API = 0xC018AA3F
_UFFDIO_REGISTER = 0xC020AA00
_UFFDIO_UNREGISTER = 0x8010AA01
_UFFDIO_WRITEPROTECT = 0xC018AA06
_PAGEMAP_SCAN = 0xC0606610
#: Of pages, for ``PAGEMAP_SCAN``.
_WATCHED, _WRITTEN, _OF_FILE, _PRESENT = 1 << 0, 1 << 1, 1 << 2, 1 << 3
#: Runs of pages that are asked for at once; each is start, end and kind.
_RUNS = 512
_COLUMNS = 3
#: Watching less is not worth its system calls.
_SMALLEST_BYTES = 2 * HUGE_PAGE_BYTES

_Numbers = np.ndarray[Any, Any]
_libc = ctypes.CDLL(None, use_errno=True)
#: Who watches.
_present: weakref.ref[WriteWatch] | None = None


class WriteWatch:
    """Memory that is watched from `watch` until `forget`.

    Whoever begins to watch ends the watch of everybody else in the process. Every method may be called
    where the kernel cannot do it; then nothing is ever unwritten.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        weakref.finalize(self, _unregister, self._ranges)

    def watch(self, address: _Numbers, nbytes: _Numbers) -> None:
        """Watch these ranges from now on, except what shares a huge page with something else.

        A huge page that is protected in part would be broken into small ones.
        """
        global _present
        descriptor = _userfaultfd()
        if descriptor is None:
            return
        former = _present() if _present is not None else None
        if former is not None and former is not self:
            former.forget()  # what is protected anew would seem unwritten to it
        _present = weakref.ref(self)
        for start, end in _whole_huge_pages(address, nbytes):
            self._ranges.append((start, end))
            with suppress(OSError):  # what is not protected counts as written
                ioctl(descriptor, _UFFDIO_REGISTER, struct.pack("4Q", start, end - start, _MODE_WP, 0))
                ioctl(descriptor, _UFFDIO_WRITEPROTECT, struct.pack("3Q", start, end - start, _PROTECTED))

    def unwritten(self, address: _Numbers, nbytes: _Numbers) -> _Numbers:
        """For each range whether it is certain that nobody has written to any of its pages."""
        clean = np.array(list(self._clean_runs()), np.int64).reshape(-1, 2)
        if not len(clean):
            return np.zeros(len(address), bool)
        run = np.maximum(np.searchsorted(clean[:, 0], address, side="right") - 1, 0)
        inside: _Numbers = (clean[run, 0] <= address) & (address + nbytes <= clean[run, 1])
        return inside

    def forget(self) -> None:
        """Watch nothing any more; before the memory is given back."""
        _unregister(self._ranges)

    def _clean_runs(self) -> Iterator[tuple[int, int]]:
        """Start and end of all watched pages that are there and unwritten, ascending."""
        if not self._ranges:
            return
        found = np.zeros((_RUNS, _COLUMNS), np.uint64)
        with open("/proc/self/pagemap", "rb") as pages, suppress(OSError):
            for start, end in sorted(self._ranges):
                while start < end:
                    question = bytearray(_question(start, end, found))
                    count = ioctl(pages, _PAGEMAP_SCAN, question)
                    yield from ((int(first), int(last)) for first, last, _ in found[:count])
                    start = struct.unpack_from("5Q", question)[4]


@functools.cache
def _userfaultfd() -> int | None:
    """This process's descriptor for watching, its only one: no memory is ever watched by two."""
    number = _SYSTEM_CALL.get(platform.machine())
    if number is None:
        return None
    descriptor: int = _libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY)
    if descriptor < 0:
        return None
    try:
        ioctl(descriptor, _UFFDIO_API, struct.pack("3Q", _API_VERSION, _FEATURE_WP_ASYNC, 0))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _leave_it_to_the_parent() -> None:
    """In a forked child, whose memory nobody watches: the descriptor is about the parent's."""
    if _userfaultfd.cache_info().currsize:
        descriptor = _userfaultfd()
        _userfaultfd.cache_clear()
        if descriptor is not None:
            os.close(descriptor)


os.register_at_fork(after_in_child=_leave_it_to_the_parent)


def _unregister(ranges: list[tuple[int, int]]) -> None:
    descriptor = _userfaultfd() if ranges else None
    while descriptor is not None and ranges:
        start, end = ranges.pop()
        with suppress(OSError):  # whoever unmapped it has ended it, too
            ioctl(descriptor, _UFFDIO_UNREGISTER, struct.pack("2Q", start, end - start))


def _question(start: int, end: int, found: _Numbers) -> bytes:
    """``struct pm_scan_arg``: pages that are watched, there, unwritten, and this process's alone."""
    not_these = _WRITTEN | _OF_FILE
    kinds = (not_these, _WATCHED | _PRESENT | not_these, 0, _WATCHED)
    return struct.pack("12Q", 96, 0, start, end, 0, found.ctypes.data, len(found), 0, *kinds)


def _whole_huge_pages(address: _Numbers, nbytes: _Numbers) -> Iterator[tuple[int, int]]:
    """Start and end of the huge pages that these ranges fill, as neighbours of each other or alone."""
    order = np.argsort(address)
    start, end = address[order], address[order] + nbytes[order]
    first = np.flatnonzero(np.append(True, start[1:] - end[:-1] > PAGE_BYTES)) if len(start) else order
    last = np.append(first[1:], len(start)) - 1
    for begin, stop in zip(start[first].tolist(), end[last].tolist(), strict=True):
        begin = -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        stop = stop // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if stop - begin >= _SMALLEST_BYTES:
            yield begin, stop
