"""Memory for many storages: few segments, all or nothing; what an allocator without counts is asked."""

from __future__ import annotations

import pytest
import torch

from gpuslice.errors import DeviceMemoryError
from gpuslice.kernels import Hold, Way, open_device
from gpuslice.kernels.cuda import allocator_memory
from gpuslice.kernels.cuda.allocator_memory import SEGMENT_BYTES, fill_up, in_segments, statistics
from gpuslice.kernels.cuda.device import _FREED, together
from gpuslice.types import DeviceName

MIB = 1 << 20
HOST = torch.device("cpu")
on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def test_large_storages_share_segments_of_about_512_mib_in_their_order() -> None:
    sizes = [100 * MIB + 1] * 12 + [5, 6] + [900 * MIB] + [20 * MIB] * 2
    divided = in_segments(sizes)
    assert [count for count, _ in divided] == [5, 5, 2, 2, 1, 2]
    assert [nbytes > 0 for _, nbytes in divided] == [True, True, True, False, False, True]
    assert sum(count for count, _ in divided) == len(sizes)
    assert all(nbytes <= SEGMENT_BYTES for _, nbytes in divided)
    assert divided[0][1] == 5 * (100 * MIB + 512)


def test_nothing_is_in_no_segment() -> None:
    assert in_segments([]) == []


def test_every_storage_gets_its_size() -> None:
    sizes = [5, 6, 20 * MIB, 7]
    wanted = [(torch.UntypedStorage(0), nbytes) for nbytes in sizes]
    fill_up(wanted)
    assert [storage.nbytes() for storage, _ in wanted] == sizes


def test_an_allocator_without_counts_has_none() -> None:
    def ask() -> int:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    assert statistics(ask) is None
    assert statistics(lambda: 3) == 3


def test_what_lies_over_memory_that_stays_stays_too() -> None:
    foreign = Hold(Way.RESIDENT, "its memory belongs to another library")
    holds = [_FREED, foreign, _FREED, _FREED]
    kept = together(holds, [(0, 9), (8, 2), (10, 5), (15, 5)])
    assert [hold.way for hold in kept] == [Way.RESIDENT, Way.RESIDENT, Way.FREED, Way.FREED]
    assert "another library knows its address" in kept[0].reason


class TestOnAGpu:
    pytestmark = on_a_gpu

    @pytest.mark.whole_gpu
    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, torch.OutOfMemoryError])
    def test_a_reserve_that_fails_half_way_leaves_nothing(
        self, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
    ) -> None:
        device = open_device(DeviceName.parse("cuda:0"))
        sizes = [1000, 4 * MIB, 30 * MIB, 2000]
        storages = [torch.UntypedStorage(nbytes, device=device.torch_device) for nbytes in sizes]
        device.free(storages)
        device.release_caches()
        before = device.memory()
        room = allocator_memory.make_room
        seen: list[int] = []

        def fail(nbytes: int, where: torch.device) -> None:
            seen.append(nbytes)
            if len(seen) == 3:
                raise error
            room(nbytes, where)

        monkeypatch.setattr(allocator_memory, "make_room", fail)
        wanted = DeviceMemoryError if error is torch.OutOfMemoryError else error
        with pytest.raises(wanted):
            device.reserve(list(zip(storages, sizes, strict=True)))
        assert [storage.nbytes() for storage in storages] == [0] * 4
        assert device.memory() == before
        seen.clear()
        with pytest.raises(wanted):
            device.allocate(sizes)
        assert device.memory() == before

    def test_a_state_comes_back_in_few_segments(self) -> None:
        device = open_device(DeviceName.parse("cuda:0"))
        sizes = [11 * MIB + 512] * 20
        storages = [torch.UntypedStorage(nbytes, device=device.torch_device) for nbytes in sizes]
        device.free(storages)
        device.release_caches()
        before = len(allocator_memory.segments([0]))
        device.reserve(list(zip(storages, sizes, strict=True)))
        assert len(allocator_memory.segments([0])) - before == 1

    def test_a_view_that_went_through_another_library_keeps_what_it_shows(self) -> None:
        device = open_device(DeviceName.parse("cuda:0"))
        own, plain = torch.ones(1000, device="cuda:0"), torch.ones(1000, device="cuda:0")
        view = torch.from_dlpack(own.__dlpack__())[500:]
        storages = [tensor.untyped_storage() for tensor in (own, plain, view)]
        holds = device.holds(storages, fixed=frozenset())
        assert [hold.way for hold in holds] == [Way.RESIDENT, Way.FREED, Way.RESIDENT]
