"""How long a suspend and a resume take, beside the best copy of the same bytes and beside ``torch.save``.

All of it in one run on one state: an Adam-trained model of ``GPUSLICE_BENCH_MIB`` MiB (default 256).
The limit is a two-thread memcpy between the same kinds of memory: the process's and a faulted tmpfs mapping.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import addressof as c_addressof
from ctypes import c_char, memmove
from pathlib import Path
from typing import Any

import pytest
import torch

from gpuslice.checkpoint.ramdisk import RamDisk
from gpuslice.checkpoint.record import SwitchRecord
from gpuslice.checkpoint.switch import Switch
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName

STATE_BYTES = int(os.environ.get("GPUSLICE_BENCH_MIB", "256")) * 2**20
ROUNDS = 7
DEVICE = DeviceName.parse(os.environ.get("GPUSLICE_BENCH_DEVICE", "cpu"))
CHUNK_BYTES = 16 * 2**20


class Trained:
    """A model with Adam moments: three times the parameters' bytes, in layers of about 4 MiB."""

    def __init__(self, nbytes: int) -> None:
        width = 1024
        layers = max(1, nbytes // (3 * 4 * width * width))
        device = open_device(DEVICE).torch_device
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def tensors(self) -> list[torch.Tensor]:
        state = [t for slots in self.optimizer.state.values() for t in slots.values()]
        return [*self.model.parameters(), *state]

    @property
    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.tensors)


@pytest.fixture(scope="module")
def trained() -> Trained:
    return Trained(STATE_BYTES)


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="gpuslice-bench-") as directory:
        os.chmod(directory, 0o700)
        yield Path(directory)


@pytest.fixture
def switch(tmpfs: Path) -> Iterator[Switch]:
    store = RamDisk(tmpfs / "ramdisk", 8 * STATE_BYTES + 2**28).open_store(None)
    yield Switch(open_device(DEVICE), store)
    store.close(keep=False)


def warm(switch: Switch) -> None:
    """Use both slots once, so that every later suspend finds a faulted arena."""
    for boundary in (1, 2):
        switch.suspend(boundary=boundary)
        switch.resume()


def note(benchmark: Any, records: list[SwitchRecord], nbytes: int, stages: tuple[str, ...]) -> None:
    """Median seconds by stage, and the rate over all of it."""
    for stage in stages:
        values = sorted(getattr(record, stage) for record in records)
        benchmark.extra_info[stage] = values[len(values) // 2]
    benchmark.extra_info["bytes"] = nbytes
    benchmark.extra_info["gb_per_s"] = nbytes / benchmark.stats.stats.median / 1e9


def test_suspend(benchmark: Any, trained: Trained, switch: Switch) -> None:
    warm(switch)
    records: list[SwitchRecord] = []

    def once() -> None:
        records.append(switch.suspend(boundary=len(records) + 3))

    def back() -> None:
        if switch.suspended:
            switch.resume()

    benchmark.pedantic(once, setup=back, rounds=ROUNDS)
    switch.resume()
    note(benchmark, records, trained.nbytes, ("quiesce_s", "find_s", "copy_out_s", "publish_s", "free_s"))


def test_resume(benchmark: Any, trained: Trained, switch: Switch) -> None:
    warm(switch)
    records: list[SwitchRecord] = []

    def once() -> None:
        records.append(switch.resume())

    def away() -> None:
        switch.suspend(boundary=len(records) + 3)

    benchmark.pedantic(once, setup=away, rounds=ROUNDS)
    note(benchmark, records, trained.nbytes, ("reserve_s", "verify_s", "copy_in_s"))


def test_first_suspend_with_a_cold_arena(benchmark: Any, trained: Trained, switch: Switch) -> None:
    benchmark.pedantic(switch.suspend, kwargs={"boundary": 1}, rounds=1)
    switch.resume()
    benchmark.extra_info["gb_per_s"] = trained.nbytes / benchmark.stats.stats.median / 1e9


@pytest.mark.parametrize("direction", ["out", "in"])
def test_limit(benchmark: Any, trained: Trained, tmpfs: Path, direction: str) -> None:
    """The same bytes, chunk by chunk on two threads, between live tensors and a faulted mapping."""
    host = [torch.empty_like(t, device="cpu") for t in trained.tensors]
    with open(tmpfs / "limit", "w+b") as file:
        file.truncate(trained.nbytes)
        mapping = mmap.mmap(file.fileno(), trained.nbytes)
    anchor = c_char.from_buffer(mapping)
    copies = list(pieces(host, c_addressof(anchor), outward=direction == "out"))
    with ThreadPoolExecutor(2) as pool:

        def once() -> None:
            list(pool.map(lambda copy: memmove(*copy), copies))

        benchmark.pedantic(once, rounds=ROUNDS, warmup_rounds=2)
    benchmark.extra_info["gb_per_s"] = trained.nbytes / benchmark.stats.stats.median / 1e9
    del anchor
    mapping.close()


def pieces(tensors: list[torch.Tensor], base: int, *, outward: bool) -> Iterator[tuple[int, int, int]]:
    """(destination, source, bytes) of every copy."""
    for tensor in tensors:
        nbytes = tensor.untyped_storage().nbytes()
        for start in range(0, nbytes, CHUNK_BYTES):
            inside, outside = tensor.data_ptr() + start, base + start
            ends = (outside, inside) if outward else (inside, outside)
            yield (*ends, min(CHUNK_BYTES, nbytes - start))
        base += nbytes


def test_torch_save(benchmark: Any, trained: Trained, tmpfs: Path) -> None:
    state = {"model": trained.model.state_dict(), "optimizer": trained.optimizer.state_dict()}
    benchmark.pedantic(lambda: torch.save(state, tmpfs / "state.pt"), rounds=3)
    benchmark.extra_info["gb_per_s"] = trained.nbytes / benchmark.stats.stats.median / 1e9


def test_torch_load(benchmark: Any, trained: Trained, tmpfs: Path) -> None:
    state = {"model": trained.model.state_dict(), "optimizer": trained.optimizer.state_dict()}
    torch.save(state, tmpfs / "state.pt")
    target = Trained(STATE_BYTES)

    def once() -> None:
        loaded = torch.load(tmpfs / "state.pt", weights_only=True)
        target.model.load_state_dict(loaded["model"])
        target.optimizer.load_state_dict(loaded["optimizer"])

    benchmark.pedantic(once, rounds=3)
    benchmark.extra_info["gb_per_s"] = trained.nbytes / benchmark.stats.stats.median / 1e9
