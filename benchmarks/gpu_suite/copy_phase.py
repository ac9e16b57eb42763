"""How near a suspend and a resume come to what the link between GPU and host can do.

``python benchmarks/gpu_suite/copy_phase.py --out FILE [--device cuda:0] [--sizes 1,4,16,40]``: the best copy
of page-locked memory first, then suspends and resumes of states of so many GB, then where packing begins to
pay, then the usual other ways (rivals.py). All in one run, every byte compared; results as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.states import median
from gpuslice.checkpoint.heap import hide_imports
from gpuslice.checkpoint.ramdisk import RamDisk
from gpuslice.checkpoint.record import SwitchRecord
from gpuslice.checkpoint.switch import Switch
from gpuslice.kernels import Device, open_device
from gpuslice.kernels.copying import Pairs
from gpuslice.types import DeviceName

GB = 10**9
MIB = 1 << 20
ROUNDS = 5
SHM = Path("/dev/shm")
STAGES = ("quiesce_s", "find_s", "admit_s", "copy_out_s", "publish_s", "free_s", "reserve_s", "copy_in_s")
RIVALS = ("to-cpu", "torch-save", "memory-saver", "memory-saver-retained", "driver")
Row = dict[str, object]


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


def threshold(name: DeviceName) -> list[Row]:
    """Seconds to copy 500 storages of each size out and in, packed and one by one."""
    from gpuslice.kernels.cuda_engine import CudaEngine
    from gpuslice.kernels.gpu_copies import GpuCopies

    device, engine = open_device(name), CudaEngine(name.index or 0)

    def row(size: int, way: str, pairs: Pairs, arena: memoryview) -> Row:
        copies = GpuCopies(engine, 4, pack_bytes=2 * size if way == "packed" else 0)
        out_s = timed(lambda: copies.copy_out(pairs, arena, None, None))
        return {
            "bytes_each": size,
            "way": way,
            "out_s": out_s,
            "in_s": timed(lambda: copies.copy_in(pairs, arena, None)),
        }

    rows: list[Row] = []
    for size in (4 << 10, 16 << 10, 64 << 10, 256 << 10, MIB, 2 * MIB, 4 * MIB):
        made = [torch.ones(size, dtype=torch.uint8, device=device.torch_device) for _ in range(500)]
        pairs = [(tensor.untyped_storage(), number * size) for number, tensor in enumerate(made)]
        arena = memoryview(bytearray(500 * size))
        device.register(arena)
        rows += [row(size, way, pairs, arena) for way in ("packed", "direct")]
        device.unregister(arena)
    return rows


def timed(work: Callable[[], object]) -> float:
    """Median seconds of `ROUNDS` calls after one that does not count."""
    times = []
    for _ in range(ROUNDS + 1):
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return median(times[1:])


def rival(name: str, device: str, nbytes: int, limit_s: float) -> Row:
    """One of the other ways, in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("rivals.py")), name, device, str(nbytes)]
    row: Row = {"rival": name, "bytes": nbytes}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return row | {"skipped": f"took longer than {limit_s:.0f} s"}
    if done.returncode != 0:
        return row | {"skipped": (done.stderr.strip().splitlines() or ["it said nothing"])[-1]}
    return row | json.loads(done.stdout.splitlines()[-1])


def fits(device: Device, nbytes: int) -> bool:
    """Whether a state, a snapshot of it and a copy for a rival find room, with a quarter to spare."""
    memory = device.memory()
    on_device = memory.total_bytes - memory.used_bytes
    on_host = min(shutil.disk_usage(SHM).free, psutil.virtual_memory().available // 2)
    return nbytes * 1.25 < min(on_device, on_host)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument(
        "--sizes", default="1,4,16,40", help="of the states, in GB; those that fit are measured"
    )
    parser.add_argument(
        "--rival-limit", type=float, default=60, metavar="SECONDS", help="for each rival and size"
    )
    arguments = parser.parse_args()
    hide_imports()  # as under `gpuslice run`
    name = DeviceName.parse(arguments.device)
    device = open_device(name)
    device.pin()
    sizes = [int(float(size) * GB) for size in arguments.sizes.split(",")]
    result: Row = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(name.index or 0) if name.kind == "cuda" else "cpu",
        "cores": len(os.sched_getaffinity(0)),
    }
    best = peak(device.torch_device, min(GB, min(sizes)))
    rows: list[Row] = []
    rivals: list[Row] = []
    result |= {"peak": best, "switches": rows, "rivals": rivals}
    for nbytes in sizes:
        if not fits(device, nbytes):
            rows.append({"bytes": nbytes, "skipped": "too little memory is free"})
            continue
        for kind in ("large", "frozen", *(["small"] if nbytes == sizes[0] else [])):
            rows.append(measure(device, kind, nbytes, best))
            device.release_caches()
            write(arguments.out, result)
        rivals += [rival(other, arguments.device, nbytes, arguments.rival_limit) for other in RIVALS]
        write(arguments.out, result)
    if name.kind == "cuda":
        result["threshold"] = threshold(name)
        write(arguments.out, result)
    return 0


def write(path: Path, result: Row) -> None:
    """After every row, so that a run that is cut off leaves what it has."""
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
