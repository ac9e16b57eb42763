"""Two jobs swap on a GPU: ``python -m benchmarks.gpu_suite.swap --out FILE [--device cuda:0] --bytes N``.

By a suspend and then a resume, and by a duplex swap, in turns. First the GPU has room for both, then hardly
more than for one. Every byte is compared before the next swap; results as JSON.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.duplex_swap.pair import Job, a_pair, at_once, one_after_the_other
from benchmarks.gpu_suite.copy_phase import peak
from benchmarks.gpu_suite.measuring import GB, ROUNDS, SHM, Row, begin, fits, write
from benchmarks.states import median

#: Portions of a state; a tight GPU has room for two of them, and for what a training step takes.
PORTIONS = 8
STEP_BYTES = 128 << 20


def swaps(jobs: tuple[Job, Job], rounds: int) -> dict[str, float]:
    """Median seconds of either way, from the order to leave to when the one that comes runs."""
    spent_s: dict[str, list[float]] = {"one_after_the_other_s": [], "at_once_s": []}
    running, parked = jobs
    for _ in range(2 * rounds):
        for name, way in zip(spent_s, (one_after_the_other, at_once), strict=True):
            running.do("train")
            began_s = time.perf_counter()
            way(running, parked)
            spent_s[name].append(time.perf_counter() - began_s)
            running, parked = parked, running
    return {name: median(seconds[2:]) for name, seconds in spent_s.items()}


def measure(device: str, nbytes: int, filler: torch.device) -> list[Row]:
    """A row with room for both jobs on the GPU, and one without."""
    os.environ["GPUSLICE_BENCH_MIB"] = str(nbytes >> 20)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=SHM, prefix="gpuslice-bench-") as directory:
        os.chmod(directory, 0o700)
        jobs = a_pair(Path(directory), nbytes // PORTIONS, "large", device)
        try:
            rows.append({"room": "for both", "bytes": jobs[0].nbytes, **swaps(jobs, ROUNDS)})
            free_bytes, _ = torch.cuda.mem_get_info(filler)
            taken = max(0, free_bytes - 2 * nbytes // PORTIONS - STEP_BYTES)
            others = torch.empty(taken, dtype=torch.uint8, device=filler)
            rows.append({"room": "for one", "bytes": jobs[0].nbytes, **swaps(jobs, ROUNDS)})
            del others
        finally:
            for job in jobs:
                job.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--bytes", type=int, default=4 * GB, help="of either state")
    arguments = parser.parse_args()
    device = begin(arguments.device)
    nbytes = max(64 << 20, arguments.bytes)  # less than a segment of the allocator cannot be given back
    if not fits(device, 2 * nbytes, 4 * nbytes):
        write(arguments.out, {"skipped": "too little memory is free"}, device.torch_device)
        return 0
    best = peak(device.torch_device, min(GB, nbytes))
    device.release_caches()
    rows = measure(arguments.device, nbytes, device.torch_device)
    for row in rows:
        for name, seconds in [(key, row[key]) for key in row if key.endswith("_s")]:
            assert isinstance(seconds, float)
            # Both directions at the same time would need no longer than the slower one.
            row[name.replace("_s", "_of_peak")] = nbytes / min(best.values()) / GB / seconds
    write(arguments.out, {"peak": best, "swaps": rows, "finished": True}, device.torch_device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
