"""A state of many small tensors: what a suspend and a resume take, in time and memory.

python -m benchmarks.suspend_latency.many_small COUNT [COUNT...] > benchmarks/results/many_small.json
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch

import gpuslice

_ELEMENTS = 4


def measure(count: int) -> dict[str, object]:
    """Suspend and resume ``count`` attached tensors twice; returns the seconds of each, and the memory."""
    values = torch.arange(float(_ELEMENTS * count)).reshape(count, _ELEMENTS)
    tensors = [row.clone() for row in values]
    seconds: dict[str, list[float]] = {"attach_s": [], "suspend_s": [], "resume_s": []}

    def timed(name: str, call: Any) -> Any:
        start_s = time.perf_counter()
        result = call()
        seconds[name].append(round(time.perf_counter() - start_s, 3))
        return result

    job = timed("attach_s", lambda: gpuslice.attach(tensors=tensors))
    for _ in range(2):
        timed("suspend_s", job.suspend)
        timed("resume_s", job.resume)
    assert all(torch.equal(*pair) for pair in zip(tensors, values, strict=True))
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"tensors": count, **seconds, "peak_rss_bytes": peak_bytes}


def main() -> None:
    """Measure each count in a process of its own, and print JSON."""
    if len(sys.argv) > 2 and sys.argv[1] == "--one":
        print(json.dumps(measure(int(sys.argv[2]))))
        return
    rows = []
    for count in sys.argv[1:]:
        command = [sys.executable, "-m", "benchmarks.suspend_latency.many_small", "--one", count]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    print(json.dumps({"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
