"""Jobs with a known truth, a hundred times, on real clocks: how many of the stated intervals contain it?

python benchmarks/known_truth/run.py [--runs 100] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from gpuslice.profiler.colocation.plan import Plan
from gpuslice.profiler.colocation.result import make_result
from gpuslice.profiler.colocation.trial import Trial, measure
from gpuslice.profiler.memory import HostMemory
from gpuslice.profiler.recorder import Recording, StepRecorder
from gpuslice.profiler.steps import analyse
from gpuslice.runtime.trainable import Optimizers

#: Of a job: steps, what each computes on average and its spread, and how long it sleeps.
STEPS, COMPUTE_S, SPREAD, SLEEP_S = 100, 0.001, 0.1, 0.001
ROUNDS = 5
#: The token bucket: processor seconds per second, and how many it holds.
RATE, BURST_S = 0.5, 0.01
MIB = 1 << 20


class Found(NamedTuple):
    """One run: whether the truth lies in the stated interval, if any; its width by the truth."""

    inside: bool | None
    width: float = 0.0


def needs_s(random: np.random.Generator) -> list[float]:
    """How long each step computes; median and mean are known."""
    return list(COMPUTE_S * random.normal(1.0, SPREAD, STEPS).clip(0.5, 1.5))


def compute(need_s: float) -> None:
    """Work for so much time of a core."""
    until_s = time.thread_time() + need_s
    while time.thread_time() < until_s:
        pass


def train(steps_s: Sequence[float], waits: Callable[[float], float]) -> Recording:
    """Compute for ``steps_s``, and wait after each until ``waits`` says, seconds from the beginning."""
    recorder = StepRecorder()
    begun_s = time.perf_counter()
    recorder.boundary(0)
    for number, need_s in enumerate(steps_s, 1):
        compute(need_s)
        left_s = begun_s + waits(need_s) - time.perf_counter()
        if left_s > 0:  # even to sleep for no time takes some
            time.sleep(left_s)
        recorder.boundary(number)
    return recorder.finish()


def at_once(need_s: float) -> float:
    """No waiting."""
    return 0.0


def mixing() -> Callable[[float], float]:
    """Each step sleeps as long; by deadlines, so that what waking up takes does not add up."""
    due_s = 0.0

    def due(need_s: float) -> float:
        nonlocal due_s
        due_s += need_s + SLEEP_S
        return due_s

    return due


def bucket() -> Callable[[float], float]:
    """Each step has to wait until the bucket had enough tokens for it."""
    now_s = tokens_s = 0.0

    def due(need_s: float) -> float:
        nonlocal now_s, tokens_s
        took_s = max(need_s, (need_s - tokens_s) / RATE)
        tokens_s = min(BURST_S, tokens_s + RATE * took_s - need_s)
        now_s += took_s
        return now_s

    return due


def mix(random: np.random.Generator) -> Found:
    """The median step time of a fixed mix of sleep and computation."""
    truth_s = COMPUTE_S + SLEEP_S
    found = analyse(train(needs_s(random), mixing())).step_seconds
    assert found is not None
    if found.interval is None:  # too few independent steps: something else kept the machine busy
        return Found(None)
    low_s, high_s = found.interval
    return Found(low_s <= truth_s <= high_s, (high_s - low_s) / truth_s)


def slow_down(random: np.random.Generator) -> Found:
    """The normalized throughput of a job behind a token bucket, over five rounds of the lab's plan."""
    trials = []
    plan = Plan(2, 2, ROUNDS)
    for task in plan.tasks():
        if task.mode == "sliced":
            trials.append(Trial(*task, 1.0, ()))
            continue
        # Only the first of the two is real: the other one is there and notices nothing.
        real = train(needs_s(random), bucket() if task.mode == "packed" else at_once)
        trials.append(Trial(*task, 1.0, measure([[real]] * len(task.members))))
    sets = make_result(("slowed", "other"), "cpu:0", 1.0, 1.0, plan, trials, None).sets
    (packed,) = (one for one in sets if one.mode == "packed")
    assert packed.interval[0] is not None
    low, high = packed.interval[0]
    return Found(low <= RATE <= high, (high - low) / RATE)


def skew(random: np.random.Generator) -> Found:
    """The skew of what a live optimizer trains; it is exact."""
    sizes = [int(size) for size in random.integers(1, 1000, 20)]
    model = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    optimizer = torch.optim.SGD(model)
    optimizers = Optimizers()
    optimizers.saw(optimizer)
    found = optimizers.skew()
    assert found is not None
    return Found(abs(found.skew - max(sizes) / sum(sizes)) < 1e-12)


def memory(random: np.random.Generator) -> Found:
    """What a tensor adds to the memory at boundaries, to a MiB."""
    size_bytes = int(random.integers(8, 16)) * MIB
    before = HostMemory()
    before.sample()
    pages = mmap(-1, size_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    tensor = torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
    after = HostMemory()
    after.sample()
    had, has = before.report().boundary_bytes, after.report().boundary_bytes
    assert had is not None
    assert has is not None
    return Found(abs(has - had - tensor.nbytes) < MIB, 2 * MIB / size_bytes)


def figures(runs: int) -> Iterator[tuple[str, dict[str, float]]]:
    """For each figure how many of the runs were right, and how wide the interval was."""
    for seed, run in enumerate((memory, mix, skew, slow_down)):
        random = np.random.default_rng(seed)
        found = [run(random) for _ in range(runs)]
        stated = [one for one in found if one.inside is not None]
        width = median(one.width for one in stated)
        counts = {"stated": len(stated), "inside": sum(one.inside is True for one in stated)}
        yield run.__name__, {**counts, "median_width": round(width, 4)}


def main() -> None:
    """Run, print, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    about = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": round(os.getloadavg()[0], 1),
        "runs": options.runs,
    }
    text = json.dumps({**about, "figures": dict(figures(options.runs))}, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
