"""How long a resume takes, here and from a new mapping, beside the best copy and the usual ways to load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from benchmarks.states import Limit, State, median, page_faults, timed
from gpuslice.checkpoint.discover.heap import hide_imports
from gpuslice.checkpoint.format.reader import open_snapshot
from gpuslice.checkpoint.named.state import check
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.record import SwitchRecord
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName

hide_imports()  # as under `gpuslice run`
STAGES = ("reserve_s", "copy_in_s")

Note = Callable[..., None]


def test_limit(benchmark: Any, state: State, tmpfs: Path, note: Note, rounds: int) -> None:
    benchmark.pedantic(Limit(state.sizes, tmpfs, outward=False), rounds=rounds, warmup_rounds=2)


def test_limit_into_fresh_memory(benchmark: Any, state: State, tmpfs: Path, note: Note, rounds: int) -> None:
    """A resume's memory has been given back: the kernel clears it before anything is copied there."""
    limit = Limit(state.sizes, tmpfs, outward=False)
    benchmark.pedantic(limit, setup=limit.take_fresh_memory, rounds=rounds, warmup_rounds=2)


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "trusting"])
def test_resume(
    benchmark: Any, state: State, store: JobStore, tmpfs: Path, note: Note, rounds: int, verify: bool
) -> None:
    """In the same process; memory is taken back, faulted in and filled.

    Before each, the limit's copy into fresh memory: ``limit_s`` is its median, ``share_of_limit`` the median
    of the quotients.
    """
    limit = Limit(state.sizes, tmpfs, outward=False)
    records: list[SwitchRecord] = []
    faults: list[float] = []
    limits_s: list[float] = []
    shares: list[float] = []
    switch = Switch(open_device(DeviceName("cpu", None)), store, verify=verify)

    def suspend() -> None:
        switch.suspend(boundary=len(records) + 1)
        limit.take_fresh_memory()
        limits_s.append(timed(limit))
        limit.give_back()

    def resume() -> None:
        before = page_faults()
        took_s = timed(lambda: records.append(switch.resume()))
        faults.append(page_faults() - before)
        shares.append(limits_s[-1] / took_s)

    for _ in range(3):
        suspend()
        resume()
    del records[:], faults[:], limits_s[:], shares[:]
    benchmark.pedantic(resume, setup=suspend, rounds=rounds)
    stages = {stage: median([getattr(record, stage) for record in records]) for stage in STAGES}
    parked = max(record.rss_parked_bytes - record.rss_before_bytes + state.nbytes for record in records)
    note(**stages, page_faults=median(faults), left_share=parked / state.nbytes)
    note(limit_s=median(limits_s), share_of_limit=median(shares))


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "trusting"])
@pytest.mark.parametrize("moments", ["present", "new"])
def test_restore_from_a_new_mapping(
    benchmark: Any, state: State, store: JobStore, note: Note, rounds: int, moments: str, verify: bool
) -> None:
    """What another process does: open the file, check every byte or trust it, load into live objects.

    The optimizer of a process that has just started has no moments yet; they are made on the way.
    """
    switch = Switch(open_device(DeviceName("cpu", None)), store)
    switch.suspend(boundary=1, named=state.named, restartable=True)
    switch.resume()
    assert switch.snapshot is not None
    path = switch.snapshot.path
    faults: list[float] = []

    def forget() -> None:
        if moments == "new":
            state.optimizer.state.clear()

    def restore() -> None:
        before = page_faults()
        with open_snapshot(path) as snapshot:
            check(snapshot, state.named, verify=verify).apply()
        faults.append(page_faults() - before)

    forget()
    restore()
    benchmark.pedantic(restore, setup=forget, rounds=rounds)
    note(page_faults=median(faults))


@pytest.mark.parametrize("mmap", [False, True], ids=["plain", "mmap"])
def test_torch_load(benchmark: Any, state: State, tmpfs: Path, note: Note, rounds: int, mmap: bool) -> None:
    torch.save(state.state_dict(), tmpfs / "state.pt")

    def load() -> None:
        loaded = torch.load(tmpfs / "state.pt", weights_only=True, mmap=mmap)
        state.module.load_state_dict(loaded["model"])
        state.base.load_state_dict(loaded["base"])
        state.optimizer.load_state_dict(loaded["optimizer"])

    benchmark.pedantic(load, rounds=rounds)


def test_safetensors(benchmark: Any, state: State, tmpfs: Path, note: Note, rounds: int) -> None:
    live = {str(number): tensor.detach() for number, tensor in enumerate(state.tensors)}
    save_file(live, tmpfs / "state.safetensors")

    def load() -> None:
        for name, loaded in load_file(tmpfs / "state.safetensors").items():
            live[name].copy_(loaded)

    benchmark.pedantic(load, rounds=rounds)


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoint(benchmark: Any, state: State, tmpfs: Path, note: Note, rounds: int) -> None:
    dcp.save(state.state_dict(), checkpoint_id=tmpfs / "dcp", no_dist=True)
    benchmark.pedantic(
        lambda: dcp.load(state.state_dict(), checkpoint_id=tmpfs / "dcp", no_dist=True), rounds=rounds
    )
