"""How far the cost model's predictions are from what switches take: real ones, predicted one ahead."""

from __future__ import annotations

import gc
import random
from statistics import median, quantiles
from typing import Any

from benchmarks.states import State
from gpuslice.checkpoint.discover.heap import hide_imports
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.kernels import open_device
from gpuslice.sched_core.switch_cost_model import CostModel, Half
from gpuslice.sched_core.switch_cost_model import State as Moved
from gpuslice.types import DeviceName

hide_imports()  # as under `gpuslice run`
MIB_FLOATS = 2**18
#: Parameters in MiB each, and how many: of few large and of many small tensors. Adam makes three of each.
SHAPES = ((16, 1), (8, 4), (0.25, 100), (1, 60), (0.01, 800))
SWITCHES = 40
#: Before these the model has seen too little.
FIRST = 8


def test_prediction_error(benchmark: Any, store: JobStore) -> None:
    """The jobs of a scheduler in random order; relative errors of suspend and resume together."""
    model, rng = CostModel(), random.Random(5)
    errors: list[float] = []
    inside: list[bool] = []

    def one_switch() -> None:
        mib, count = rng.choice(SHAPES)
        state = State([int(mib * MIB_FLOATS)] * count)
        switch = Switch(open_device(DeviceName("cpu", None)), store)
        record = switch.suspend(boundary=1)
        record = switch.resume()
        moved = Moved(record.bytes_copied, record.storages, "cpu", record.route)
        predicted = model.switch(moved)
        outward, inward = record.suspend_stages_s(), record.resume_stages_s()
        actual_s = record.suspend_s + record.resume_s
        if predicted is not None:
            errors.append(abs(predicted.seconds / actual_s - 1))
            if predicted.error_s is not None:
                inside.append(abs(predicted.seconds - actual_s) <= 2 * predicted.error_s)
        model.learn(Half.SUSPEND, moved, outward)
        model.learn(Half.RESUME, moved, inward)
        del state
        gc.collect()

    benchmark.pedantic(one_switch, rounds=SWITCHES, warmup_rounds=2)
    late = errors[FIRST:]
    benchmark.extra_info["median_relative_error"] = median(late)
    benchmark.extra_info["p90_relative_error"] = quantiles(late, n=10)[-1]
    benchmark.extra_info["within_two_errors"] = sum(inside[FIRST:]) / len(inside[FIRST:])
