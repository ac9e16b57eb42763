"""Every CUDA call of a suspend and of a resume fails once: no byte of the state is lost."""

from __future__ import annotations

from collections.abc import Iterator

import cudasim
import pytest
import torch

from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import GpusliceError
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName

from ..checkpoint.harness import digest

MIB = 1 << 20
INVALID, OUT_OF_MEMORY, LAUNCH_FAILURE = 1, 2, 719
#: Scalars and odd sizes that are packed, and large storages of several chunks and blocks.
SIZES = (4, 1000, 70_001, MIB, 5 * MIB + 3, 20 * MIB)
#: Calls that move, take or give back something, or wait; the others only ask.
FALLIBLE = (
    *("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaHostRegister", "cudaHostUnregister"),
    *("cudaMemcpyAsync", "cudaMemsetAsync", "cuLaunchKernel", "cudaStreamCreateWithPriority"),
    *("cudaEventCreateWithFlags", "cudaEventRecordWithFlags", "cudaEventSynchronize", "cudaStreamWaitEvent"),
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemGetInfo"),
)
#: Most places of a call that are tried; they are spread over all of them.
PLACES = 12


class Job:
    """Tensors and a switch; each round ends as it began, or the test fails."""

    def __init__(self, store: JobStore) -> None:
        torch.cuda.manual_seed(5)
        self.tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8, device="cuda:0") for n in SIZES]
        self.switch = Switch(open_device(DeviceName("cuda", 0)), store)
        self.before = digest(*self.tensors, torch.cuda.get_rng_state(0))
        self.refused: list[str] = []

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

    def resume(self) -> None:
        """At the second try at the latest: the first one may have met the fault, and has changed nothing."""
        try:
            self.switch.resume()
        except (GpusliceError, RuntimeError) as error:
            self.refused.append(f"resume: {type(error).__name__}")
            cudasim.forget_faults()
            assert self.switch.snapshot is not None, "the snapshot is kept"
            self.switch.snapshot.verify()
            self.switch.resume()
        self.check("after a resume")

    def check(self, when: str) -> None:
        cudasim.forget_faults()
        assert digest(*self.tensors, torch.cuda.get_rng_state(0)) == self.before, when


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with RamDisk(tmp_path_factory.mktemp("faults") / "ramdisk", 256 * MIB).open_store(None) as store:
        made = Job(store)
        for _ in range(3):  # arenas are mapped and locked, kernels compiled, streams made
            assert made.suspend()
            made.resume()
        yield made


def calls(job: Job, *, out: bool) -> dict[str, int]:
    """How often each call happens in one direction."""
    if out:
        with cudasim.counting() as counts:
            assert job.suspend()
        job.resume()
    else:
        assert job.suspend()
        with cudasim.counting() as counts:
            job.switch.resume()
    return counts


def places(count: int) -> list[int]:
    """Of so many calls: the first, the last, and some between."""
    if count <= PLACES:
        return list(range(1, count + 1))
    return sorted({1 + number * (count - 1) // (PLACES - 1) for number in range(PLACES)})


@pytest.mark.parametrize("code", [INVALID, OUT_OF_MEMORY, LAUNCH_FAILURE])
@pytest.mark.parametrize("name", FALLIBLE)
@pytest.mark.parametrize("out", [True, False], ids=["suspend", "resume"])
def test_a_call_that_fails_costs_no_byte(job: Job, out: bool, name: str, code: int) -> None:
    for place in places(calls(job, out=out).get(name, 0)):
        if out:
            cudasim.fail(name, code, nth=place)
            if job.suspend():
                job.resume()
        else:
            assert job.suspend()
            cudasim.fail(name, code, nth=place)
            job.resume()
        assert job.suspend(), "the next one works"
        job.resume()


def test_what_fails_is_noticed(job: Job) -> None:
    """The matrix above would say nothing if faults went unnoticed."""
    job.refused.clear()
    cudasim.fail("cudaMemcpyAsync", LAUNCH_FAILURE)
    assert not job.suspend()
    assert job.suspend()
    cudasim.fail("cudaMemcpyAsync", LAUNCH_FAILURE)
    job.resume()
    assert len(job.refused) == 2


def test_memory_that_is_short_leaves_nothing_taken(job: Job) -> None:
    assert job.suspend()
    before = cudasim.used_bytes(0)
    cudasim.fail("cudaMalloc", OUT_OF_MEMORY, nth=1)
    cudasim.fail("cudaMalloc", OUT_OF_MEMORY, nth=2)
    with pytest.raises(GpusliceError, match="bytes free"):
        job.switch.resume()
    assert cudasim.used_bytes(0) == before
    job.resume()
