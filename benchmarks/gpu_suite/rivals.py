"""``python -m benchmarks.gpu_suite.rivals WAY DEVICE BYTES``: take a state off a device and bring it back.

By another way than ours, each in a process of its own. Prints JSON: times, or why the way was skipped. Exit
code 1 if other bytes came back.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from benchmarks.gpu_suite.measuring import MIB, as_json
from benchmarks.states import median

ROUNDS = 3


def tensors_of(nbytes: int, device: str) -> list[torch.Tensor]:
    """A state in tensors of 32 MiB."""
    size = min(nbytes, 32 * MIB) // 4
    return [torch.full((size,), n, dtype=torch.int32, device=device) for n in range(nbytes // 4 // size)]


def to_cpu(nbytes: int, device: str) -> dict[str, object]:
    """``tensor.to("cpu")`` and back, tensor by tensor."""
    state = {"tensors": tensors_of(nbytes, device)}

    def out() -> None:
        state["tensors"] = [tensor.to("cpu", copy=True) for tensor in state["tensors"]]

    def back() -> None:
        state["tensors"] = [tensor.to(device, copy=True) for tensor in state["tensors"]]

    return timed(out, back, lambda: state["tensors"])


def torch_save(nbytes: int, device: str) -> dict[str, object]:
    """``torch.save`` to a RAM disk and ``torch.load`` from it."""
    tensors = tensors_of(nbytes, device)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="gpuslice-bench-") as directory:
        path = Path(directory) / "state.pt"

        def back() -> None:
            saved = torch.load(path, weights_only=True, map_location="cpu")
            for tensor, copy in zip(tensors, saved, strict=True):
                tensor.copy_(copy)

        return timed(lambda: torch.save(tensors, path), back, lambda: tensors)


def memory_saver(nbytes: int, device: str, *, retained: bool) -> dict[str, object]:
    """torch_memory_saver with a copy on the host: by default, or with the host's memory retained."""
    from torch_memory_saver import torch_memory_saver as saver  # type: ignore[import-not-found]

    saver.hook_mode = "torch"
    with saver.region(enable_cpu_backup=True):
        tensors = tensors_of(nbytes, device)
    if retained:
        saver.retain_cpu_backup = True
    return timed(saver.pause, saver.resume, lambda: tensors)


def by_driver(nbytes: int, device: str) -> dict[str, object]:
    """``cuCheckpointProcess*`` of another process that holds the state."""
    from gpuslice.kernels.driver import Process

    command = [sys.executable, "-m", "benchmarks.gpu_suite.rivals", "hold", device, str(nbytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "holding\n", "the process with the state did not start"
            process = Process(child.pid)

            def out() -> None:
                process.lock()
                process.checkpoint()

            def back() -> None:
                process.restore()
                process.unlock()

            found = timed(out, back, None)
            child.stdin.close()
            if child.stdout.readline() != "same bytes\n":
                raise SystemExit("the process came back with other bytes")
            return found
        finally:
            child.kill()  # a locked one would wait for ever


def hold(nbytes: int, device: str) -> None:
    """Keep a state until somebody closes standard input; then say whether it is the same."""
    tensors = tensors_of(nbytes, device)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    print("holding", flush=True)
    sys.stdin.read()
    same = all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))
    print("same bytes" if same else "other bytes", flush=True)


def timed(
    out: Callable[[], object], back: Callable[[], object], tensors: Callable[[], list[torch.Tensor]] | None
) -> dict[str, object]:
    """The first round apart, the median of the others; what came back is compared."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else nullcontext
    seconds: dict[str, list[float]] = {"out_s": [], "in_s": []}
    for _ in range(ROUNDS + 1):
        for name, work in (("out_s", out), ("in_s", back)):
            began_s = time.perf_counter()
            work()
            if tensors is not None:
                synchronize()
            seconds[name].append(time.perf_counter() - began_s)
        for number, tensor in enumerate(tensors() if tensors else []):
            if not bool((tensor == number).all()):
                raise SystemExit(f"tensor {number} came back with other bytes")
    found: dict[str, object] = {f"first_{name}": times[0] for name, times in seconds.items()}
    return found | {name: median(times[1:]) for name, times in seconds.items()}


WAYS: dict[str, Callable[[int, str], dict[str, object]]] = {
    "to-cpu": to_cpu,
    "torch-save": torch_save,
    "memory-saver": lambda nbytes, device: memory_saver(nbytes, device, retained=False),
    "memory-saver-retained": lambda nbytes, device: memory_saver(nbytes, device, retained=True),
    "driver": by_driver,
}


def main(way: str, device: str, nbytes: int) -> int:
    if way == "hold":
        hold(nbytes, device)
        return 0
    found: dict[str, object] = {"rival": way, "bytes": nbytes}
    try:
        found |= WAYS[way](nbytes, device)
    except Exception as error:  # noqa: BLE001 - whatever keeps a rival from running is its result
        found["skipped"] = f"{type(error).__name__}: {error}"
    print(as_json(found, torch.device(device)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
