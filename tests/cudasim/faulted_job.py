"""A job on simulated GPUs whose CUDA calls fail one by one; as a script of its own, by the vmm route."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import cudasim
import torch

from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import GpusliceError
from gpuslice.kernels import open_device
from gpuslice.kernels.vmm.shim import Vmm, loaded
from gpuslice.types import DeviceName

from ..checkpoint.harness import digest

MIB = 1 << 20
INVALID, OUT_OF_MEMORY, LAUNCH_FAILURE = 1, 2, 719
CODES = (INVALID, OUT_OF_MEMORY, LAUNCH_FAILURE)
#: Scalars and odd sizes that are packed, and large storages of several chunks and blocks.
SIZES = (4, 1000, 70_001, MIB, 5 * MIB + 3, 20 * MIB)
#: Calls that move, take or give back something, or wait; the others only ask.
FALLIBLE = (
    *("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaHostRegister", "cudaHostUnregister"),
    *("cudaMemcpyAsync", "cudaMemsetAsync", "cuLaunchKernel", "cudaStreamCreateWithPriority"),
    *("cudaEventCreateWithFlags", "cudaEventRecordWithFlags", "cudaEventSynchronize", "cudaStreamWaitEvent"),
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemGetInfo"),
)
#: What the vmm route calls besides.
OF_VMM = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease")
#: What fails while it happens.
SUSPEND, RESUME, MOVE = DIRECTIONS = "suspend", "resume", "move"
#: Most places of a call that are tried; they are spread over all of them.
PLACES = 6


class Job:
    """Tensors and a switch; each round ends as it began, or the test fails."""

    def __init__(self, store: JobStore, shim: Vmm | None = None) -> None:
        torch.cuda.manual_seed_all(5)
        self.home, self.other = (open_device(DeviceName("cuda", index)) for index in (0, 1))
        self.tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8, device="cuda:0") for n in SIZES]
        self.switch = Switch(self.home, store, shim=shim)
        self.before = self.digest()
        self.refused: list[str] = []
        self._calls: dict[str, Mapping[str, int]] = {}

    def digest(self) -> str:
        on_host = [tensor.cpu() for tensor in self.tensors]
        return digest(*on_host, torch.cuda.get_rng_state(self.switch.device.torch_device))

    def suspend(self) -> bool:
        """Whether the job is parked; if not, it is as if nothing had happened."""
        try:
            self.switch.suspend(boundary=1)
        except (GpusliceError, RuntimeError) as error:
            self.refused.append(f"suspend: {type(error).__name__}")
            cudasim.forget_faults()
            self.check("after a suspend that failed")
            return False
        return True

    def resume(self, *, move: bool = False) -> None:
        """At the second try at the latest: the first one may have met the fault, and has changed nothing."""
        target = (self.other if self.switch.device is self.home else self.home) if move else None
        try:
            self.switch.resume(target)
        except (GpusliceError, RuntimeError) as error:
            self.refused.append(f"resume: {type(error).__name__}")
            cudasim.forget_faults()
            assert self.switch.snapshot is not None, "the snapshot is kept"
            self.switch.snapshot.verify()
            self.switch.resume(target)
        self.check("after a resume")

    def check(self, when: str) -> None:
        cudasim.forget_faults()
        assert self.digest() == self.before, when
        assert {tensor.device for tensor in self.tensors} == {self.switch.device.torch_device}, when

    def calls(self, direction: str) -> Mapping[str, int]:
        """How often each call happens in one direction, counted once."""
        if direction not in self._calls:
            with cudasim.counting() as out:
                assert self.suspend()
            with cudasim.counting() as back:
                self.resume_only(move=direction == MOVE)
            self._calls[direction] = out if direction == SUSPEND else back
        return self._calls[direction]

    def resume_only(self, *, move: bool) -> None:
        """Without a look at the bytes."""
        self.switch.resume((self.other if self.switch.device is self.home else self.home) if move else None)

    def fail_everywhere(self, direction: str, name: str, code: int) -> int:
        """Let each of these calls fail once, place by place; how many places those were."""
        tried = places(self.calls(direction).get(name, 0))
        for place in tried:
            if direction == SUSPEND:
                cudasim.fail(name, code, nth=place)
                if self.suspend():
                    self.resume()
            else:
                assert self.suspend()
                cudasim.fail(name, code, nth=place)
                self.resume(move=direction == MOVE)
        if tried:
            assert self.suspend(), "the next one works"
            self.resume()
        return len(tried)


def places(count: int) -> list[int]:
    """Of so many calls: the first, the last, and some between."""
    if count <= PLACES:
        return list(range(1, count + 1))
    return sorted({1 + number * (count - 1) // (PLACES - 1) for number in range(PLACES)})


def opened(directory: Path, shim: Vmm | None = None) -> Iterator[Job]:
    """A job that is warm: arenas are mapped and locked, kernels compiled, streams made."""
    with RamDisk(directory / "ramdisk", 256 * MIB).open_store(None) as store:
        made = Job(store, shim)
        for _ in range(3):
            assert made.suspend()
            made.resume()
        yield made
        made.tensors.clear()  # beside those on the other GPU no later job of this process could be suspended


def main() -> None:
    """Every call of the vmm route, in a process that has its shim; a line for each that happens at all."""
    with tempfile.TemporaryDirectory() as directory:
        for job in opened(Path(directory), loaded()):
            for direction in (SUSPEND, RESUME):
                for name in (*FALLIBLE, *OF_VMM):
                    tried = [job.fail_everywhere(direction, name, code) for code in CODES]
                    if any(tried):
                        print(direction, name, *tried, flush=True)
            print("refused", len(job.refused), flush=True)
