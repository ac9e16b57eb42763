"""What must survive a suspend, bit for bit: every case runs plain, and suspended at every boundary.

While parked, the shared generators are drawn from and the memory given back is written over. The last
tests break the capture on purpose: a matrix that could not fail would show nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gpuslice.checkpoint.discover.heap import hide_imports
from gpuslice.checkpoint.discover.storages import sweep
from gpuslice.checkpoint.format import gsnp, layout
from gpuslice.checkpoint.named import process_rng
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.room_requests import request_room
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.record import SwitchRecord
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import CorruptSnapshotError
from gpuslice.kernels import Device, open_device
from gpuslice.kernels.cuda import copy_plan
from gpuslice.kernels.host import copies
from gpuslice.kernels.host.device import CpuDevice
from gpuslice.kernels.transfer import Checksums, Inspector, Pairs, Transfer
from gpuslice.types import DeviceName

from .cases import frameworks, loops, optimizers, places, tensors
from .cases.registry import BOUNDARIES, CASES, Loop
from .harness import FaultyDevice, digest, disturb, flip_a_byte, seed

MODULES = (frameworks, loops, optimizers, places, tensors)
#: Bytes of the first layer's weights, and of their gradients and moments.
WEIGHTS = 32 * 128 * 4
SLOW = {"compiled-inductor", "compiled-aot_eager"}
#: torch announces the end of some features that must survive while they are there.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*[Ss]parse.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize.*"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf.*:UserWarning"),
    # What torch 2.6 says of its own code.
    pytest.mark.filterwarnings("ignore:.*skipfiles_inline_module_allowlist.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:The epoch parameter in .scheduler.step.*:UserWarning"),
]


@pytest.fixture(autouse=True)
def earlier_imports_hidden() -> None:
    """Some cases import 100,000 objects, such as a compiler; no suspend of a later case looks at them."""
    hide_imports()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobStore]:
    with RamDisk(tmp_path_factory.mktemp("matrix") / "ramdisk", 1 << 30).open_store(None) as opened:
        yield opened


def plain(loop: Loop) -> list[str]:
    """The digests of an undisturbed run, boundary by boundary."""
    seed(11)
    return [digest(process_rng.capture(), *state) for state in loop]


@cache
def undisturbed(name: str) -> list[str]:
    """The digests of the case's undisturbed run on the CPU, which several tests compare with."""
    return plain(CASES[name]())


def suspended(loop: Loop, switch: Switch, meanwhile: Callable[[], object] = disturb) -> list[str]:
    """The digests of a run that is suspended at every boundary."""
    seed(11)
    digests = []
    for boundary, state in enumerate(loop, start=1):
        digests.append(digest(process_rng.capture(), *state))
        switch.suspend(boundary=boundary)
        meanwhile()
        switch.resume()
        assert digest(process_rng.capture(), *state) == digests[-1], (
            f"changed while parked at boundary {boundary}"
        )
    return digests


def marks(name: str) -> list[pytest.MarkDecorator]:
    found = [pytest.mark.slow] if name in SLOW else []
    if name == "sharded_parameters":
        old = torch.__version__ < (2, 7)
        found.append(pytest.mark.skipif(old, reason="fully_shard does not run on the CPU before torch 2.7"))
    return found


NAMES = [pytest.param(name, marks=marks(name)) for name in sorted(CASES)]


@pytest.mark.parametrize("name", NAMES)
def test_survives(name: str, store: JobStore) -> None:
    expected = undisturbed(name)
    assert len(expected) >= BOUNDARIES
    assert suspended(CASES[name](), Switch(CpuDevice(DeviceName("cpu", None)), store)) == expected


def of_which(quick: set[str]) -> list[object]:
    """All cases as parameters, where those that might well notice are checked every day."""
    assert quick <= CASES.keys()
    return [
        pytest.param(name, marks=[*marks(name), *([] if name in quick else [pytest.mark.repeats])])
        for name in sorted(CASES.keys() - SLOW)  # what compilers make is looked at once
    ]


class Twice(Switch):
    """Suspends a job that was resumed for less than a step: most of its state has not changed."""

    unchanged_bytes = 0

    def suspend(self, **options: Any) -> SwitchRecord:
        super().suspend(**options)
        disturb()
        self.resume()
        record = super().suspend(**options)
        self.unchanged_bytes += record.bytes_unchanged
        return record


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Storages of a page or more are large ones, in chunks of a page."""
    for module in (layout, gsnp, copies, copy_plan):
        monkeypatch.setattr(module, "CHUNK_BYTES", layout.PAGE_BYTES)
    monkeypatch.setattr(layout, "LARGE_BYTES", layout.PAGE_BYTES)
    layout.place.cache_clear()
    yield
    layout.place.cache_clear()


#: Their weights have several chunks each.
CHUNKED = {"adam", "accumulation", "dropout", "moving_averages", "pending_graph", "sgd-foreach-momentum"}


@pytest.mark.usefixtures("tiny_chunks")
@pytest.mark.parametrize("name", of_which(CHUNKED))
def test_survives_in_many_chunks_of_which_most_have_not_changed(name: str, tmp_path: Path) -> None:
    expected = undisturbed(name)
    with RamDisk(tmp_path / "ramdisk", 1 << 30).open_store(None) as store:
        switch = Twice(CpuDevice(DeviceName("cpu", None)), store)
        assert suspended(CASES[name](), switch) == expected
        assert switch.snapshot is not None
        assert switch.snapshot.record.chunks > len(switch.snapshot.storages) or name not in CHUNKED
        assert switch.unchanged_bytes > 0 or name not in CHUNKED


@pytest.mark.parametrize(
    "name", of_which({"adam", "accumulation", "loader_with_persistent_workers", "odd_places"})
)
def test_survives_a_spill(name: str, tmp_path: Path) -> None:
    expected = undisturbed(name)
    disk = RamDisk(tmp_path / "ramdisk", 1 << 30, spill_directory=tmp_path / "spill")
    with disk.open_store(None) as store:
        switch = Switch(CpuDevice(DeviceName("cpu", None)), store)

        def meanwhile() -> None:
            assert switch.snapshot is not None
            with store.offering(switch.snapshot):
                assert request_room(store.directory)
            assert not list(store.directory.glob("*.gsnp"))
            disturb()

        assert suspended(CASES[name](), switch, meanwhile) == expected


#: Cases whose tensors may as well live on a GPU, and whose kernels there give the same bits every time.
ON_GPU = [
    "accumulation",
    "activation_checkpointing",
    "adam",
    "adamw-fused",
    "dropout",
    "gan",
    "moving_averages",
    "pending_graph",
    "sgd-foreach-momentum",
    "step_inside_backward",
    "truncated_backpropagation",
    "views_of_one_storage",
    "zeroed_gradients",
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("name", ON_GPU)
def test_survives_on_a_gpu(name: str, store: JobStore) -> None:
    device = open_device(DeviceName("cuda", 0))
    with torch.device(device.torch_device):
        expected = plain(CASES[name]())
        assert suspended(CASES[name](), Switch(device, store)) == expected


def test_every_optimizer_has_a_case() -> None:
    assert optimizers.all_optimizers() <= optimizers.covered_optimizers()


def victim() -> Loop:
    """The case on which broken captures are tried: parameters, moments, dropout, NumPy's memory."""
    return CASES["dropout"]()


def fails(switch: Switch, loop: Callable[[], Loop] = victim) -> bool:
    """Whether the matrix notices that something is broken."""
    expected = plain(loop())
    try:
        return suspended(loop(), switch) != expected
    except AssertionError:
        return True


class BrokenDevice(FaultyDevice):
    """Breaks storages of one size, but leaves alone what lived before it: other tests' and torch's own."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._nbytes = nbytes
        self._older = {one.key for one in sweep(CpuDevice(self.name))}
        self.broken = 0

    def owns(self, storage: torch.UntypedStorage) -> bool:
        return super().owns(storage) and storage._cdata not in self._older

    def is_victim(self, nbytes: int) -> bool:
        self.broken += nbytes == self._nbytes
        return nbytes == self._nbytes


class NotCopiedOut(BrokenDevice):
    def copy_out(
        self,
        pairs: Pairs,
        arena: memoryview,
        inspect: Inspector | None = None,
        checksums: Checksums | None = None,
    ) -> Transfer:
        others = [pair for pair in pairs if not self.is_victim(pair[0].nbytes())]
        return super().copy_out(others, arena, inspect, checksums)


class NotCopiedIn(BrokenDevice):
    def copy_in(
        self,
        pairs: Pairs,
        arena: memoryview,
        inspect: Inspector | None = None,
        checksums: Checksums | None = None,
    ) -> Transfer:
        others = [pair for pair in pairs if not self.is_victim(pair[0].nbytes())]
        return super().copy_in(others, arena, inspect, checksums)


class BitFlipped(BrokenDevice):
    def copy_in(
        self,
        pairs: Pairs,
        arena: memoryview,
        inspect: Inspector | None = None,
        checksums: Checksums | None = None,
    ) -> Transfer:
        transfer = super().copy_in(pairs, arena, inspect, checksums)
        for storage, _ in pairs:
            if self.is_victim(storage.nbytes()):
                torch.empty(0, dtype=torch.uint8).set_(storage)[1] ^= 4
        return transfer


@pytest.mark.parametrize("kind", [NotCopiedOut, NotCopiedIn, BitFlipped])
@pytest.mark.parametrize("nbytes", [WEIGHTS, 128 * 4, 4], ids=["weights", "biases", "steps"])
def test_a_broken_copy_is_noticed(store: JobStore, kind: type[BrokenDevice], nbytes: int) -> None:
    device = kind(nbytes)
    assert fails(Switch(device, store))
    assert device.broken


class Tampered(Switch):
    """Its snapshots are changed while it is parked."""

    def resume(self, device: Device | None = None) -> SwitchRecord:
        assert self.snapshot is not None
        flip_a_byte(self.snapshot, "float32 [128, 32]")
        return super().resume(device)


def test_a_byte_flipped_in_the_snapshot_is_noticed(store: JobStore) -> None:
    assert fails(Tampered(BrokenDevice(0), store, verify=False))


def test_checksums_notice_it_first(store: JobStore) -> None:
    switch = Tampered(BrokenDevice(0), store)
    with pytest.raises(CorruptSnapshotError):
        fails(switch)


def test_generators_that_are_not_put_back_are_noticed(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuslice.checkpoint.named.process_rng.restore", lambda states: None)
    assert fails(Switch(FaultyDevice(), store))


def test_an_unbroken_capture_is_not_accused(store: JobStore) -> None:
    assert not fails(Switch(FaultyDevice(), store))
