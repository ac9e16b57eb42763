"""What is remembered from suspend to suspend never shows: a snapshot is what it would be without."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gpuslice.checkpoint.discover import heap
from gpuslice.checkpoint.discover.storages import sweep
from gpuslice.checkpoint.format.reader import open_snapshot
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.switch.capture_plan import plan_capture
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.kernels.host.device import CpuDevice
from gpuslice.types import DeviceName

from ..harness import SpyGate

DEVICE = CpuDevice(DeviceName("cpu", None))
State = dict[str, torch.Tensor]
#: Bytes, label and content of each storage.
Contents = Counter[tuple[int, str, bytes]]


def state() -> State:
    """Tensors whose sizes nothing else has."""
    tensors = {name: torch.arange(1000.0 + number) for number, name in enumerate("abcdefgh")}
    tensors["weight"] = torch.nn.Parameter(torch.ones(2001))
    return tensors


def saved(switch: Switch) -> Contents:
    """What the newest snapshot holds."""
    assert switch.snapshot is not None
    with open_snapshot(switch.snapshot.path) as snapshot:
        return Counter(
            (spec.nbytes, spec.label, bytes(snapshot.view(sid))) for sid, spec in enumerate(snapshot.storages)
        )


def found_anew() -> Contents:
    """What there is to save, looked for by somebody who has never looked."""
    with heap.uncollected():
        plan = plan_capture(DEVICE, sweep(DEVICE), ())
    specs = zip(plan.storages, plan.layout.storages, strict=True)
    return Counter((spec.nbytes, spec.label, _content(storage)) for storage, spec in specs)


def unlabelled(inventory: Contents) -> list[tuple[int, bytes]]:
    return sorted((nbytes, content) for nbytes, _, content in inventory.elements())


def _content(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())  # without a tensor over it


def _storage_resized(x: State) -> None:
    x["a"].untyped_storage().resize_(8008)
    x["b"].untyped_storage().resize_(0)


def _tensor_resized(x: State) -> None:
    x["a"].resize_(3000).fill_(4.0)


def _another_at_the_same_address(x: State) -> None:
    before = x["c"].data_ptr()
    kept = []
    del x["c"]
    for _ in range(1000):  # the allocator gives the same again, sooner or later
        x["c"] = torch.full((1002,), 6.0)
        if x["c"].data_ptr() == before:
            return
        kept.append(x["c"])
    pytest.skip("the allocator gives the same memory to nobody")


def _new_and_gone(x: State) -> None:
    del x["d"]
    x["new"] = torch.ones(4321, dtype=torch.float16)


def _another_dtype(x: State) -> None:
    x["a"].data = x["a"].data.view(torch.int32)


def _another_shape(x: State) -> None:
    x["a"] = x["a"].view(10, 100)
    x["e"].data = x["e"].data.view(2, 502)
    x["e"].t_()


def _set_to_another_storage(x: State) -> None:
    x["a"].set_(x["b"].untyped_storage(), 3, (5,), (1,))


def _shared(x: State) -> None:
    x["view"] = x["a"][3:]
    x["tied"] = torch.empty(0, dtype=torch.uint8).set_(x["b"].untyped_storage())
    x["c"].set_(x["d"])


def _data_swapped(x: State) -> None:
    x["a"].data, x["h"].data = x["h"].data, x["a"].data


def _gradients(x: State) -> None:
    x["weight"].sum().backward()
    x["inner"] = x["weight"] * 2
    x["inner"].retain_grad()
    (x["inner"] * 3).sum().backward()


def _held_by_a_graph(x: State) -> None:
    x["pending"] = (x["weight"] * x["weight"]).sum()


def _over_the_same_memory(x: State) -> None:
    array = np.arange(5000)
    x["one"], x["other"] = torch.from_numpy(array), torch.from_numpy(array[100:])


def _in_shared_memory(x: State) -> None:
    x["a"].share_memory_()


def _sparse(x: State) -> None:
    x["sparse"] = torch.eye(37).to_sparse()


class _Special(torch.Tensor):
    pass


def _another_class(x: State) -> None:
    x["a"].__class__ = _Special  # type: ignore[assignment]


def _changed_in_place(x: State) -> None:
    x["a"].mul_(x["weight"][:1])


def _given_away(x: State) -> None:
    x["a"].capsule = torch.utils.dlpack.to_dlpack(x["b"])  # type: ignore[attr-defined]


def _storage_made_anew(x: State) -> None:
    for name in "ab":
        size = x[name].numel()
        x[name].set_()
        x[name].set_(torch.full((size,), 5.0))


def _bare(x: State) -> None:
    x["holder"] = torch.nn.Parameter(torch.ones(1))
    x["holder"].kept = x["f"].untyped_storage()  # type: ignore[attr-defined]
    del x["f"]


CHANGES: list[Callable[[State], None]] = [
    _storage_resized,
    _tensor_resized,
    _another_at_the_same_address,
    _new_and_gone,
    _another_dtype,
    _another_shape,
    _set_to_another_storage,
    _shared,
    _data_swapped,
    _gradients,
    _held_by_a_graph,
    _over_the_same_memory,
    _in_shared_memory,
    _sparse,
    _another_class,
    _changed_in_place,
    _given_away,
    _storage_made_anew,
    _bare,
]
#: What says nothing new to anybody but people: a label is that of when the tensor was first over its storage.
RELABELLED = (_another_dtype, _another_shape)


@pytest.mark.filterwarnings("ignore:.*Sparse.*")
@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__.strip("_") for change in CHANGES])
def test_a_change_between_two_suspends_is_in_the_snapshot(shm: Path, change: Callable[[State], None]) -> None:
    with RamDisk(shm / "disk", 1 << 30).open_store(None) as store:
        switch = Switch(DEVICE, store, gate=SpyGate())
        tensors = state()
        for boundary in (1, 2):
            switch.suspend(boundary=boundary)
            switch.resume()
        change(tensors)
        switch.suspend(boundary=3)
        after_the_change = saved(switch)
        switch.resume()
        if change in RELABELLED:
            assert unlabelled(after_the_change) == unlabelled(found_anew())
        else:
            assert after_the_change == found_anew()
        switch.suspend(boundary=4)
        assert unlabelled(saved(switch)) == unlabelled(after_the_change)
        switch.resume()
