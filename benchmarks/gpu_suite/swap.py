"""Two jobs swap on a GPU: ``python -m benchmarks.gpu_suite.swap --out FILE [--device cuda:0] --bytes N``.

By a suspend and then a resume. First the GPU has room for both, then hardly more than for one. Every byte is
compared before the next swap; results as JSON.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.child import Child
from benchmarks.gpu_suite.copy_phase import peak
from benchmarks.gpu_suite.measuring import GB, ROUNDS, SHM, Row, begin, fits, write
from benchmarks.states import median

#: On a tight GPU a quarter of a state is free beside the one that runs, and what a training step takes.
SPARE_SHARE = 1 / 4
STEP_BYTES = 128 << 20


class Job:
    """A process with one job in it (`benchmarks.gpu_suite.swap_job`)."""

    def __init__(self, nbytes: int, device: str, directory: Path, name: str) -> None:
        self._child = Child("benchmarks.gpu_suite.swap_job", nbytes, device, directory, name)
        self.close = self._child.close
        self.nbytes = int(self._child.listen())

    def do(self, word: str) -> None:
        """Have it done."""
        assert self._child.ask(word) == "done"


def a_pair(nbytes: int, device: str, directory: Path) -> tuple[Job, Job]:
    """Start two jobs with warm arenas: the first one runs, the other one is parked."""
    first, second = (Job(nbytes, device, directory, name) for name in ("one", "two"))
    for job in (first, second):
        for word in ("suspend", "resume", "train", "suspend"):
            job.do(word)
    first.do("resume")
    return first, second


def swap_s(jobs: tuple[Job, Job], rounds: int) -> float:
    """Return the median of seconds from the order to leave to when the one that comes runs."""
    spent_s: list[float] = []
    running, parked = jobs
    for _ in range(2 * rounds):
        running.do("train")
        began_s = time.perf_counter()
        running.do("suspend")
        parked.do("resume")
        spent_s.append(time.perf_counter() - began_s)
        running, parked = parked, running
    return median(spent_s[2:])


def measure(device: str, nbytes: int, filler: torch.device) -> list[Row]:
    """A row with room for both jobs on the GPU, and one without."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=SHM, prefix="gpuslice-bench-") as directory:
        os.chmod(directory, 0o700)
        jobs = a_pair(nbytes, device, Path(directory))
        try:
            rows.append({"room": "for both", "bytes": jobs[0].nbytes, "swap_s": swap_s(jobs, ROUNDS)})
            free_bytes, _ = torch.cuda.mem_get_info(filler)
            taken = max(0, free_bytes - int(nbytes * SPARE_SHARE) - STEP_BYTES)
            others = torch.empty(taken, dtype=torch.uint8, device=filler)
            rows.append({"room": "for one", "bytes": jobs[0].nbytes, "swap_s": swap_s(jobs, ROUNDS)})
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
        seconds = row["swap_s"]
        assert isinstance(seconds, float)
        # The bytes go out and others come in, one after the other.
        row["swap_of_peak"] = nbytes * sum(1 / rate for rate in best.values()) / GB / seconds
    write(arguments.out, {"peak": best, "swaps": rows, "finished": True}, device.torch_device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
