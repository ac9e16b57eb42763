"""What a suspend takes beyond copying, by the number of tensors."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.states import STATE_BYTES, Limit, State, median
from gpuslice.checkpoint.discover.heap import hide_imports
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName

hide_imports()  # as under `gpuslice run`
#: Everything but the copy.
STAGES = ("quiesce_s", "find_s", "admit_s", "publish_s", "free_s")
#: A round is short, and what it takes hangs on what the processor's caches still have.
_TIMES_THE_ROUNDS = 3
#: Of every parameter there are itself, two moments and a step.
_TENSORS_PER_PARAMETER = 4


@pytest.fixture(scope="module", params=[800, 4000, 10_000])
def state(request: pytest.FixtureRequest) -> State:
    """So many tensors of an Adam, trained a step."""
    parameters = request.param // _TENSORS_PER_PARAMETER
    return State([STATE_BYTES // 12 // parameters] * parameters)


def test_fixed_cost(
    benchmark: Any, state: State, store: JobStore, tmpfs: Path, note: Callable[..., None], rounds: int
) -> None:
    """Suspends of a trained state into a warm arena; beside each, the limit's copy of the same bytes."""
    switch = Switch(open_device(DeviceName("cpu", None)), store)
    limit = Limit(state.sizes, tmpfs, outward=True)
    records, limits = [], []

    def train() -> None:
        if switch.suspended:
            switch.resume()
        state.train()
        start_s = time.perf_counter()
        limit()
        limits.append(time.perf_counter() - start_s)

    def suspend() -> None:
        records.append(switch.suspend(boundary=len(records) + 1))

    for _ in range(3):
        train()
        suspend()
    del records[:], limits[:]
    benchmark.pedantic(suspend, setup=train, rounds=_TIMES_THE_ROUNDS * rounds)
    switch.resume()
    columns = {stage: [getattr(record, stage) for record in records] for stage in (*STAGES, "copy_out_s")}
    columns["beyond_copying_s"] = [sum(getattr(record, stage) for stage in STAGES) for record in records]
    columns["limit_s"] = limits
    note(**{name: {"min": min(times), "median": median(times)} for name, times in columns.items()})
