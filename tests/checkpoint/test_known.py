"""What is known from the last look is said only of the same tensor over the same storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from gpuslice.checkpoint import heap
from gpuslice.checkpoint.discover import sweep
from gpuslice.checkpoint.known import Known, Under
from gpuslice.checkpoint.parts import plain
from gpuslice.checkpoint.swappable import keep_tensors_swappable
from gpuslice.kernels.cpu import CpuDevice
from gpuslice.types import DeviceName

Row = list[torch.Tensor]


class Special(torch.Tensor):
    """A plain subclass."""


class Interrupted(CpuDevice):
    """Its look is broken off when a storage of so many bytes is found."""

    def owns(self, storage: torch.UntypedStorage) -> bool:
        if storage.nbytes() == 4 * 1234:
            raise KeyboardInterrupt
        return super().owns(storage)


def row() -> Row:
    return [torch.ones(3), torch.ones(4), torch.nn.Parameter(torch.ones(5)), torch.ones(6)]


def learnt(tensors: Row) -> Known:
    known = Known()
    learn(known, 0, tensors)
    return known


def learn(known: Known, start: int, tensors: Row) -> None:
    described = plain(tensors)
    assert described is not None
    known.learn(start, tensors, Under.of(*described, [True] * len(tensors)))


def keys(tensors: Row) -> list[int]:
    return [tensor.untyped_storage()._cdata for tensor in tensors]


def set_elsewhere(x: torch.Tensor) -> None:
    x.set_(torch.ones(4).untyped_storage())  # type: ignore[call-overload]


def set_to_one_at_the_same_address(x: torch.Tensor) -> None:
    """The Python object of the storage is where that of the old one was, if the allocator wants it so."""
    before = id(x.untyped_storage())
    x.set_()  # type: ignore[call-overload]
    kept = []
    for _ in range(100):
        kept.append(torch.ones(4).untyped_storage())
        if id(kept[-1]) == before:
            break
    x.set_(kept[-1])  # type: ignore[call-overload]


def data_elsewhere(x: torch.Tensor) -> None:
    x.data = torch.ones(4)


def resized(x: torch.Tensor) -> None:
    x.resize_(100)


def storage_resized(x: torch.Tensor) -> None:
    x.untyped_storage().resize_(32)


def of_another_class(x: torch.Tensor) -> None:
    x.__class__ = Special  # type: ignore[assignment]


CHANGES: list[Callable[[torch.Tensor], None]] = [
    set_elsewhere,
    set_to_one_at_the_same_address,
    data_elsewhere,
    resized,
    storage_resized,
    of_another_class,
]


def test_the_same_tensors_over_the_same_storages_are_known() -> None:
    tensors = row()
    known = learnt(tensors)
    assert known.same(0, tensors) == [tensor.untyped_storage() for tensor in tensors]
    settled = known.settled()
    assert settled.pick("abcd") == list("abcd")
    assert settled.keys == keys(tensors)
    assert settled.labels == ["float32 [3]", "float32 [4]", "float32 [5]", "float32 [6]"]
    assert settled.sizes == [12, 16, 20, 24]


def test_what_follows_has_each_storage_of_the_device_once() -> None:
    tensors = row()
    known = Known()
    described = plain([*tensors, tensors[2].view(5, 1), torch.empty(0)])
    assert described is not None
    known.learn(0, tensors * 2, Under.of(*described, [True, False, True, True, True, True]))
    assert known.settled().pick("abcdef") == ["a", "c", "d"]
    assert known.settled().sizes == [12, 20, 24]
    known.keep([False, True, False, True, True, True])
    assert known.settled().pick("bdef") == ["d", "e"]
    assert known.settled().sizes == [24, 20]


def test_what_follows_is_forgotten_with_the_first_row_that_changes() -> None:
    tensors = row()
    references = list(map(weakref.ref, (tensor.untyped_storage() for tensor in tensors)))
    for change in (lambda known: known.keep([True] * 4), lambda known: learn(known, 2, tensors[2:3])):
        known = learnt(tensors)
        assert not known.covers(references)
        known.cover(references)
        assert known.covers(references)
        assert not known.covers(references[:3])
        change(known)
        assert not known.covers(references)


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_nothing_is_known_of_a_tensor_that_changed(change: Callable[[torch.Tensor], None]) -> None:
    tensors = row()
    known = learnt(tensors)
    change(tensors[1])
    assert known.same(0, tensors) is None
    assert known.same(2, tensors[2:]) is not None
    learn(known, 0, tensors)
    assert known.same(0, tensors) is not None
    assert known.settled().keys == keys(tensors)


def test_a_known_tensor_does_not_become_another_one() -> None:
    """What makes a plain tensor a sparse or quantized one torch refuses to do with one that is known."""
    tensors = row()
    known = learnt(tensors)
    references = list(map(weakref.ref, tensors))  # as `heap` has them
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(tensors[1], torch.eye(4).to_sparse())
    with pytest.raises(RuntimeError, match="incompatible"):
        tensors[1].data = torch.eye(4).to_sparse()
    assert known.same(0, tensors) is not None
    del references


def test_tensors_that_a_look_has_seen_can_be_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.zeros(3), torch.eye(4).to_sparse()
    keys = {part.untyped_storage()._cdata for part in (first, second._values())}
    device = CpuDevice(DeviceName("cpu", None))
    assert keys <= set(sweep(device).keys)
    monkeypatch.setattr(torch.utils, "swap_tensors", torch.utils.swap_tensors)
    keep_tensors_swappable.__wrapped__()
    torch.utils.swap_tensors(first, second)
    assert (first.is_sparse, second.tolist()) == (True, [0.0, 0.0, 0.0])
    assert keys <= set(sweep(device).keys)


def test_another_tensor_over_the_same_storage_is_asked() -> None:
    device = CpuDevice(DeviceName("cpu", None))
    tensor, later = torch.ones(1236), torch.ones(1237)
    for _ in range(2):
        assert {"float32 [1236]", "float32 [1237]"} <= set(sweep(device).labels)
    tensor = torch.empty(0).set_(tensor.untyped_storage(), 0, (2, 618))  # type: ignore[call-overload]
    labels = sweep(device).labels
    assert labels.count("float32 [2, 618]") == labels.count("float32 [1237]") == 1
    assert "float32 [1236]" not in labels
    del tensor, later


def test_those_behind_one_that_is_gone_are_known_where_they_are_now() -> None:
    tensors = row()
    known = learnt(tensors)
    del tensors[1]
    known.keep([True, False, True, True])
    tensors.append(torch.ones(7))
    assert len(known) == 3
    assert known.same(0, tensors[:3]) is not None
    assert known.settled().keys == keys(tensors[:3])
    assert known.same(0, tensors) is None
    learn(known, 3, tensors[3:])
    assert len(known) == 4
    assert known.same(0, tensors) is not None


def test_what_is_not_plain_is_asked_every_time() -> None:
    tensors = row()
    known = Known()
    known.learn(0, tensors, None)
    assert len(known) == len(tensors)
    assert known.same(0, tensors) is None


def test_nothing_is_kept_alive() -> None:
    tensors = row()
    traces = [weakref.ref(item) for item in (*tensors, *(tensor.untyped_storage() for tensor in tensors))]
    known = learnt(tensors)
    assert known.same(0, tensors) is not None
    del tensors
    assert not any(trace() is not None for trace in traces)


def test_a_look_that_is_interrupted_leaves_nothing_half_known() -> None:
    device = Interrupted(DeviceName("cpu", None))
    before = torch.ones(1233)
    sweep(device)
    trap = torch.ones(1234)
    with pytest.raises(KeyboardInterrupt):
        sweep(device)
    assert device not in heap._seen[torch.Tensor].notes
    del trap
    after = torch.ones(1235)
    for _ in range(2):
        found = sweep(device)
        assert [found.sizes.count(tensor.nbytes) for tensor in (before, after)] == [1, 1]


def test_a_storage_that_no_tensor_is_over_any_more_is_found() -> None:
    device = CpuDevice(DeviceName("cpu", None))
    tensor, bare = torch.ones(1238), []
    for _ in range(3):
        assert sweep(device).sizes.count(tensor.nbytes) == 1
    bare.append(torch.UntypedStorage(12391))
    for _ in range(3):
        assert sweep(device).sizes.count(12391) == 1
    bare.append(tensor.untyped_storage())
    tensor.set_()  # type: ignore[call-overload]
    for _ in range(3):
        found = sweep(device)
        assert found.labels[found.keys.index(bare[1]._cdata)] == "a bare storage"
    del found
    bare.clear()
    assert not {12391, 4 * 1238} & set(sweep(device).sizes)
