"""Host memory: pages, mappings, copies."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from gpuslice.kernels import host
from gpuslice.kernels.host import PAGE_BYTES, AddressSpace, copy_bytes, drop_pages, view_address, whole_pages


@pytest.mark.parametrize(
    ("address", "nbytes", "expected"),
    [
        (PAGE_BYTES, PAGE_BYTES, (PAGE_BYTES, PAGE_BYTES)),
        (PAGE_BYTES + 1, 2 * PAGE_BYTES, (2 * PAGE_BYTES, PAGE_BYTES)),
        (PAGE_BYTES + 1, PAGE_BYTES, (2 * PAGE_BYTES, 0)),
        (PAGE_BYTES, 10, (PAGE_BYTES, 0)),
    ],
)
def test_whole_pages(address: int, nbytes: int, expected: tuple[int, int]) -> None:
    assert whole_pages(address, nbytes) == expected


def test_dropped_pages_read_as_zeros_and_the_edges_stay() -> None:
    array = np.ones(10 * PAGE_BYTES, np.uint8)
    address = view_address(memoryview(array))
    first, nbytes = whole_pages(address, array.nbytes)
    drop_pages(address, array.nbytes)
    inside = array[first - address : first - address + nbytes]
    assert not inside.any()
    assert array.sum() == array.nbytes - nbytes


def test_pages_that_the_kernel_keeps_are_an_error() -> None:
    with pytest.raises(OSError, match="madvise"):
        drop_pages(0, 16 * PAGE_BYTES)


def test_copies_of_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "COPY_CHUNK_BYTES", 1000)
    source = np.random.default_rng(0).integers(0, 256, 2500, np.uint8)
    target = np.zeros_like(source)
    copy_bytes(view_address(memoryview(target)), view_address(memoryview(source)), source.nbytes)
    assert np.array_equal(source, target)


def test_which_memory_is_plain() -> None:
    array = np.ones(1 << 20, np.uint8)
    with mmap.mmap(-1, 1 << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as shared:
        space = AddressSpace()
        view = memoryview(shared)
        assert space.is_plain(view_address(memoryview(array)), array.nbytes)
        assert not space.is_plain(view_address(view), 1 << 20)
        assert not space.is_plain(view_address(memoryview(array)), 1 << 45)
        view.release()
