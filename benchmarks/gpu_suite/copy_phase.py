"""How near a suspend and a resume come to what the link between GPU and host can do.

``python -m benchmarks.gpu_suite.copy_phase --out FILE [--device cuda:0] --bytes N``: the best copy of
page-locked memory first, then suspends and resumes of states of so many bytes. Every byte is compared;
results as JSON.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.gpu_suite.measuring import GB, MIB, ROUNDS, SHM, Row, begin, fits, write
from benchmarks.states import median
from gpuslice.checkpoint.discover.heap import hide_imports
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.switch.record import SwitchRecord
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.kernels import Device

KINDS = ("large", "frozen", "small")
STAGES = ("quiesce_s", "find_s", "admit_s", "copy_out_s", "publish_s", "free_s", "reserve_s", "copy_in_s")


def tensors_of(kind: str, nbytes: int, device: torch.device) -> list[torch.Tensor]:
    """A state of that many bytes: ``large`` and ``frozen`` in tensors of 32 MiB, ``small`` in 4,000."""
    size = max(1, nbytes // 4000) if kind == "small" else min(nbytes, 32 * MIB)
    return [torch.full((size // 4,), n, dtype=torch.int32, device=device) for n in range(nbytes // size)]


def train(kind: str, tensors: list[torch.Tensor]) -> None:
    """Change what training would change: everything, or a tenth beside a frozen base."""
    for tensor in tensors[:: 10 if kind == "frozen" else 1]:
        tensor.add_(1)


def fingerprint(tensors: list[torch.Tensor]) -> list[int]:
    """Of every tensor a sum over its words and their places, so that a wrong or moved word shows."""
    places = torch.arange(max(t.numel() for t in tensors), dtype=torch.int64, device=tensors[0].device) | 1
    return [int((tensor.to(torch.int64) * places[: tensor.numel()]).sum()) for tensor in tensors]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak(device: torch.device, nbytes: int) -> dict[str, float]:
    """The best of `ROUNDS` copies of page-locked memory, each way, in 1e9 bytes per second."""
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.ones(nbytes, dtype=torch.uint8, device=device)

    def best(target: torch.Tensor, source: torch.Tensor) -> float:
        times = []
        for _ in range(ROUNDS + 1):
            synchronize(device)
            began_s = time.perf_counter()
            target.copy_(source, non_blocking=True)
            synchronize(device)
            times.append(time.perf_counter() - began_s)
        return nbytes / min(times[1:]) / GB

    return {"out_gb_per_s": best(host, there), "in_gb_per_s": best(there, host)}


@contextmanager
def switch_on(device: Device, nbytes: int) -> Iterator[Switch]:
    """A switch with a RAM disk of its own."""
    with tempfile.TemporaryDirectory(dir=SHM, prefix="gpuslice-bench-") as directory:
        os.chmod(directory, 0o700)
        with RamDisk(Path(directory) / "ramdisk", 2 * nbytes + 2**28).open_store(None) as store:
            yield Switch(device, store)


def measure(device: Device, kind: str, nbytes: int, best: dict[str, float]) -> Row:
    """Suspends and resumes of one state: the first one apart, the others' median stages beside the peak."""
    tensors = tensors_of(kind, nbytes, device.torch_device)
    records: list[SwitchRecord] = []
    with switch_on(device, nbytes) as switch:
        for boundary in range(ROUNDS + 1):
            train(kind, tensors)
            before = fingerprint(tensors)
            switch.suspend(boundary=boundary)
            records.append(switch.resume())
            if fingerprint(tensors) != before:
                raise AssertionError(f"{kind} of {nbytes} bytes came back with other bytes")
    first, warm = records[0], records[1:]
    stages = {stage: median([getattr(record, stage) for record in warm]) for stage in STAGES}
    suspend_s, resume_s = (median([getattr(r, name) for r in warm]) for name in ("suspend_s", "resume_s"))
    copied = warm[-1].bytes_copied
    limit_out_s, limit_in_s = copied / best["out_gb_per_s"] / GB, copied / best["in_gb_per_s"] / GB
    return {
        "kind": kind,
        "bytes": copied,
        "tensors": len(tensors),
        "stages": stages,
        "copy_out_of_peak": limit_out_s / stages["copy_out_s"],
        "copy_in_of_peak": limit_in_s / stages["copy_in_s"],
        "suspend_of_peak": limit_out_s / suspend_s,
        "resume_of_peak": limit_in_s / resume_s,
        "first_suspend_s": first.suspend_s,
        "first_admit_s": first.admit_s,
        "first_registrations": first.registrations,
        "copy_out": warm[-1].as_dict()["copy_out"],
        "copy_in": warm[-1].as_dict()["copy_in"],
        "page_faults": warm[-1].page_faults,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--bytes", type=int, default=4 * GB, help="of the states")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    arguments = parser.parse_args()
    hide_imports()  # as under `gpuslice run`
    device = begin(arguments.device)
    rows: list[Row] = []
    result: Row = {"bytes": arguments.bytes, "switches": rows}
    if not fits(device, arguments.bytes, arguments.bytes):
        write(arguments.out, result | {"skipped": "too little memory is free"}, device.torch_device)
        return 0
    best = peak(device.torch_device, min(GB, arguments.bytes))
    result["peak"] = best
    for kind in arguments.kinds:
        rows.append(measure(device, kind, arguments.bytes, best))
        device.release_caches()
        write(arguments.out, result, device.torch_device)
    write(arguments.out, result | {"finished": True}, device.torch_device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
