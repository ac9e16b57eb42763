"""What every ``Device`` must do, on every backend of this machine."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.kernels import Device, Way, open_device
from gpuslice.kernels.transfer import Pairs
from gpuslice.types import DeviceName

from .checksums import Remembered, checksum_reference

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
BACKENDS = [
    pytest.param("cpu", id="cpu"),
    pytest.param("cpu:0", id="cpu-slot"),
    pytest.param("null:0", id="null"),
    pytest.param("cuda:0", id="cuda", marks=[pytest.mark.gpu, needs_cuda]),
]
#: Small, page-sized, odd, and large enough for an own mapping.
SIZES = [1, 64, 4096, 4097, 300_001, 3 << 20, (9 << 20) + 5]


@pytest.fixture(params=BACKENDS)
def device(request: pytest.FixtureRequest) -> Device:
    opened = open_device(DeviceName.parse(request.param))
    if opened.name.kind == "cuda":
        # Before CUDA begins, it neither locks pages nor has a generator.
        torch.empty(1, device=opened.torch_device)
    return opened


def storages_on(device: Device, sizes: list[int]) -> list[torch.UntypedStorage]:
    generator = torch.Generator().manual_seed(7)
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
    return [tensor.to(device.torch_device).untyped_storage() for tensor in tensors]


def content(storage: torch.UntypedStorage) -> bytes:
    return bytes(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu().clone().numpy())


def places_of(storages: list[torch.UntypedStorage]) -> tuple[Pairs, memoryview]:
    """The storages one after the other, and an arena with room for them."""
    offsets = list(accumulate((storage.nbytes() for storage in storages), initial=0))
    return list(zip(storages, offsets, strict=False)), memoryview(bytearray(offsets[-1]))


def test_its_name_is_what_was_asked_for(device: Device) -> None:
    assert open_device(device.name).name == device.name


def test_a_round_trip_gives_back_every_byte(device: Device) -> None:
    storages = storages_on(device, SIZES)
    before = [content(storage) for storage in storages]
    pairs, arena = places_of(storages)
    holds = device.holds(storages, fixed=frozenset())
    assert {hold.way for hold in holds} == {Way.FREED}
    device.synchronize()
    device.copy_out(pairs, arena)
    device.free(storages)
    device.release_caches()
    device.reserve([(storage, len(data)) for storage, data in zip(storages, before, strict=True)])
    device.copy_in(pairs, arena.toreadonly())
    assert [content(storage) for storage in storages] == before


def test_tensors_stay_valid_views(device: Device) -> None:
    base = torch.arange(100_000, dtype=torch.float32, device=device.torch_device)
    view, expected = base[10::3], base[10::3].cpu().tolist()
    storage = base.untyped_storage()
    pairs, arena = places_of([storage])
    device.copy_out(pairs, arena)
    device.free([storage])
    device.reserve([(storage, arena.nbytes)])
    device.copy_in(pairs, arena)
    assert view.cpu().tolist() == expected
    assert base._version == 0


def test_what_is_free_is_not_freed_again(device: Device) -> None:
    storages = storages_on(device, SIZES)
    before = [content(storage) for storage in storages]
    pairs, arena = places_of(storages)
    device.copy_out(pairs, arena)
    device.free(storages[:3])
    device.free(storages)
    device.reserve([(storage, len(data)) for storage, data in zip(storages, before, strict=True)])
    device.copy_in(pairs, arena)
    assert [content(storage) for storage in storages] == before


def test_reserve_leaves_a_whole_storage_alone(device: Device) -> None:
    (storage,) = storages_on(device, [4096])
    before = content(storage), storage.data_ptr()
    device.reserve([(storage, 4096)])
    assert (content(storage), storage.data_ptr()) == before


def test_host_storages_are_copied_out_by_every_device(device: Device) -> None:
    storage = torch.arange(1000).untyped_storage()
    pairs, arena = places_of([storage])
    device.copy_out(pairs, arena)
    if device.name.kind != "null":
        assert bytes(arena) == content(storage)


@pytest.mark.parametrize("offset", [-1, 1])
def test_nothing_is_written_outside_of_the_arena(device: Device, offset: int) -> None:
    if device.name.kind == "null":
        pytest.skip("moves nothing, so looks at nothing")
    (storage,) = storages_on(device, [64])
    with pytest.raises((ValueError, RuntimeError)):
        device.copy_out([(storage, offset)], memoryview(bytearray(64)))


def test_an_inspector_sees_every_byte_in_both_directions(device: Device) -> None:
    if device.name.kind == "null":
        pytest.skip("moves nothing, so looks at nothing")
    storages = storages_on(device, SIZES)
    pairs, arena = places_of(storages)
    seen: dict[int, bytes] = {}

    def note(offset: int, data: memoryview) -> bool:
        seen[offset] = bytes(data)
        return True

    device.copy_out(pairs, arena, note)
    expected = b"".join(content(storage) for storage in storages)
    assert b"".join(seen[offset] for offset in sorted(seen)) == expected == bytes(arena)
    seen.clear()
    device.copy_in(pairs, arena, note)
    assert b"".join(seen[offset] for offset in sorted(seen)) == expected


def test_what_is_not_there_is_copied_and_every_byte_is_counted(device: Device) -> None:
    if device.name.kind == "null":
        pytest.skip("moves nothing, so counts nothing")
    pairs, arena = places_of(storages_on(device, SIZES))
    checksums = Remembered(pairs)
    transfer = device.copy_out(pairs, arena, None, checksums)
    assert bytes(arena) == b"".join(content(storage) for storage, _ in pairs)
    assert sum(transfer.paths.values()) == sum(SIZES)
    expected = {
        offset: checksum_reference(bytes(arena[offset : offset + nbytes]))
        for offset, nbytes in checksums.told.items()
    }
    assert checksums.sums == expected
    assert sum(device.copy_in(pairs, arena).paths.values()) == sum(SIZES)


def test_what_an_inspector_raises_stops_the_copy(device: Device) -> None:
    if device.name.kind == "null":
        pytest.skip("moves nothing, so looks at nothing")
    pairs, arena = places_of(storages_on(device, SIZES))

    def refuse(offset: int, data: memoryview) -> bool:
        raise LookupError(offset)

    with pytest.raises(LookupError):
        device.copy_out(pairs, arena, refuse)
    with pytest.raises(LookupError):
        device.copy_in(pairs, arena, refuse)


def test_new_storages_have_their_sizes_and_its_device(device: Device) -> None:
    made = device.allocate([1, 5000])
    assert [storage.nbytes() for storage in made] == [1, 5000]
    assert all(device.owns(storage) for storage in made)


def test_it_owns_no_meta_tensors(device: Device) -> None:
    assert not device.owns(torch.empty(3, device="meta").untyped_storage())


def test_memory_adds_up(device: Device) -> None:
    memory = device.memory()
    assert 0 <= memory.used_bytes <= memory.total_bytes
    assert memory.allocated_bytes is None or memory.allocated_bytes <= memory.reserved_bytes


def test_arenas_can_be_registered_twice_and_let_go(device: Device) -> None:
    with mmap.mmap(-1, 1 << 20) as mapping:
        arena = memoryview(mapping)
        assert device.register(arena)
        assert device.register(arena)
        device.unregister(arena)
        device.unregister(arena)
        arena.release()


def test_its_generator_repeats(device: Device) -> None:
    state = device.rng_state()
    if state is None:
        with pytest.raises(EnvironmentUnusableError):
            device.set_rng_state(torch.get_rng_state())
        return
    draw: Callable[[], torch.Tensor] = lambda: torch.rand(5, device=device.torch_device)  # noqa: E731
    first = draw()
    device.set_rng_state(state)
    assert torch.equal(first, draw())


@pytest.mark.parametrize("name", ["cpu:999", "cuda:99"])
def test_what_is_not_there_is_named(name: str) -> None:
    with pytest.raises(EnvironmentUnusableError, match=name):
        open_device(DeviceName.parse(name))
