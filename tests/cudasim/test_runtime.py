"""The simulated runtime is strict where a GPU is: its own rules, call by call, without gpuslice."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from threading import Thread

import cudasim
import pytest
import torch

from ..patience import PATIENCE_S

MIB = 1 << 20
GRANULE = 2 * MIB
INVALID, OUT_OF_MEMORY, INVALID_HANDLE = 1, 2, 400
ALREADY_LOCKED, NOT_LOCKED = 712, 713


def call(name: str, *arguments: object) -> int:
    """One call of the runtime's C API; its code."""
    torch.cuda.init()
    code: int = getattr(cudasim.runtime(), name)(*arguments)
    return code


def size(n: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(n)


def pointer(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


@pytest.fixture(autouse=True)
def forgotten_errors() -> Iterator[None]:
    yield
    call("cudaGetLastError")


@pytest.fixture
def block() -> Iterator[int]:
    """The address of 3 MiB of the device."""
    address = ctypes.c_void_p()
    assert call("cudaMalloc", ctypes.byref(address), size(3 * MIB)) == 0
    assert address.value
    yield address.value
    call("cudaFree", address)


@pytest.fixture
def stream() -> int:
    return int(torch.cuda.Stream(0).cuda_stream)


@pytest.fixture
def pages() -> Iterator[int]:
    """4 MiB of a shared mapping, as arenas are."""
    with mmap.mmap(-1, 4 * MIB) as mapping:
        view = (ctypes.c_char * len(mapping)).from_buffer(mapping)
        yield ctypes.addressof(view)
        del view


def cudasim_child(code: str) -> int:
    """The exit code of a process with GPUs of its own."""
    source = f"import ctypes, os, torch, cudasim\n{code}"
    environ = {name: value for name, value in os.environ.items() if name != "CUDASIM_ACCOUNT"}
    return subprocess.run(
        [sys.executable, "-c", source], env=environ, timeout=PATIENCE_S, check=False
    ).returncode


def copy(to: int, source: int, nbytes: int, stream: int = 0) -> int:
    return call("cudaMemcpyAsync", pointer(to), pointer(source), size(nbytes), 4, pointer(stream))


def settle(stream: int) -> int:
    return call("cudaStreamSynchronize", pointer(stream))


def test_memory_is_taken_in_granules_and_nvml_sees_the_same() -> None:
    import pynvml

    torch.cuda.init()
    torch.cuda.mem_get_info(0)
    before = cudasim.used_bytes(0)
    address = ctypes.c_void_p()
    assert call("cudaMalloc", ctypes.byref(address), size(5)) == 0
    assert cudasim.used_bytes(0) - before == GRANULE
    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert pynvml.nvmlDeviceGetMemoryInfo(handle).used == total_bytes - free_bytes == cudasim.used_bytes(0)
    (process,) = (p for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid())
    assert process.usedGpuMemory == cudasim.used_bytes(0)
    assert str(torch.cuda.get_device_properties(0).uuid) in pynvml.nvmlDeviceGetUUID(handle)
    assert call("cudaFree", address) == 0
    assert cudasim.used_bytes(0) == before


def test_more_than_there_is_is_refused_and_takes_nothing() -> None:
    torch.cuda.mem_get_info(0)
    before, address = cudasim.used_bytes(0), ctypes.c_void_p()
    assert call("cudaMalloc", ctypes.byref(address), size(1 << 40)) == OUT_OF_MEMORY
    assert (cudasim.used_bytes(0), address.value) == (before, None)
    assert call("cudaPeekAtLastError") == OUT_OF_MEMORY
    assert call("cudaGetLastError") == OUT_OF_MEMORY
    assert call("cudaGetLastError") == 0


def test_the_host_cannot_touch_device_memory(block: int) -> None:
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        ctypes.string_at(block, 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -11


def test_freed_memory_is_gone_and_its_address_is_not_used_again() -> None:
    first, second = ctypes.c_void_p(), ctypes.c_void_p()
    assert call("cudaMalloc", ctypes.byref(first), size(MIB)) == 0
    assert call("cudaFree", first) == 0
    assert call("cudaMalloc", ctypes.byref(second), size(MIB)) == 0
    assert first.value != second.value
    host = ctypes.create_string_buffer(8)
    assert first.value
    assert copy(ctypes.addressof(host), first.value, 8) == INVALID
    assert call("cudaFree", first) == INVALID
    assert call("cudaFree", second) == 0


def test_fresh_memory_is_poisoned(block: int) -> None:
    host = ctypes.create_string_buffer(8)
    assert copy(ctypes.addressof(host), block, 8) == 0
    assert host.raw == b"\xff" * 8


@pytest.mark.parametrize("past", [0, 1])
def test_a_copy_stays_within_its_block(block: int, past: int) -> None:
    host = ctypes.create_string_buffer(16)
    assert copy(ctypes.addressof(host), block + 3 * MIB - 8 + past, 8) == past * INVALID


def test_pageable_memory_is_staged(block: int, stream: int) -> None:
    host = ctypes.create_string_buffer(b"before", 6)
    with cudasim.held(stream):
        assert copy(block, ctypes.addressof(host), 6, stream) == 0
        host.raw = b"after!"
    back = ctypes.create_string_buffer(6)
    assert copy(ctypes.addressof(back), block, 6, stream) == 0  # into pageable memory: it has arrived
    assert back.raw == b"before"


def test_page_locked_memory_is_read_when_the_copy_is_made(block: int, stream: int, pages: int) -> None:
    assert call("cudaHostRegister", pointer(pages), size(4 * MIB), 1) == 0
    ctypes.memmove(pages, b"before", 6)
    with cudasim.held(stream):
        assert copy(block, pages, 6, stream) == 0
        ctypes.memmove(pages, b"after!", 6)
    assert settle(stream) == 0
    with cudasim.held(stream):
        assert copy(pages + MIB, block, 6, stream) == 0
        assert ctypes.string_at(pages + MIB, 6) == bytes(6), "nobody has waited for it"
    assert settle(stream) == 0
    assert ctypes.string_at(pages + MIB, 6) == b"after!"
    assert call("cudaHostUnregister", pointer(pages)) == 0


def test_a_copy_across_two_locks_is_refused(block: int, pages: int) -> None:
    for at in (0, MIB):
        assert call("cudaHostRegister", pointer(pages + at), size(MIB), 1) == 0
    assert copy(block, pages, MIB) == 0
    assert copy(block, pages + MIB - 8, 16) == INVALID, "two locks"
    assert copy(block, pages + 2 * MIB - 8, 16) == INVALID, "a lock and what lies behind it"
    for at in (0, MIB):
        assert call("cudaHostUnregister", pointer(pages + at)) == 0


def test_memory_is_locked_once_and_unlocked_once(pages: int) -> None:
    before = cudasim.locked_bytes()
    assert call("cudaHostRegister", pointer(pages), size(2 * MIB), 1) == 0
    for at, nbytes in ((0, 2 * MIB), (MIB, 4096), (MIB, 2 * MIB)):
        assert call("cudaHostRegister", pointer(pages + at), size(nbytes), 1) == ALREADY_LOCKED
    assert cudasim.locked_bytes() - before == 2 * MIB
    assert call("cudaHostUnregister", pointer(pages)) == 0
    assert call("cudaHostUnregister", pointer(pages)) == NOT_LOCKED
    assert cudasim.locked_bytes() == before


def test_a_lock_is_of_pages_not_of_addresses(block: int) -> None:
    """A lock that was not released before its mapping went away: bytes go to the pages that were there."""
    with mmap.mmap(-1, MIB) as kept:
        library = ctypes.CDLL(None)
        library.mmap.restype = ctypes.c_void_p
        view = (ctypes.c_char * MIB).from_buffer(kept)
        address = ctypes.addressof(view)
        assert call("cudaHostRegister", pointer(address), size(MIB), 1) == 0
        private_anonymous_fixed, read_write = 0x32, 3
        at = library.mmap(pointer(address), size(MIB), read_write, private_anonymous_fixed, -1, 0)
        assert at == address
        assert copy(address, block, 8, 0) == 0
        torch.cuda.synchronize()
        assert ctypes.string_at(address, 8) == bytes(8), "the mapping that is there now"
        assert call("cudaHostUnregister", pointer(address)) == 0
        del view


def test_a_new_thread_works_on_the_first_device() -> None:
    torch.cuda.set_device(1)
    try:
        seen = []
        thread = Thread(target=lambda: seen.append(torch.cuda.current_device()))
        thread.start()
        thread.join()
        assert (seen, torch.cuda.current_device()) == ([0], 1)
    finally:
        torch.cuda.set_device(0)


def test_an_event_belongs_to_its_device() -> None:
    event = ctypes.c_void_p()
    assert call("cudaEventCreateWithFlags", ctypes.byref(event), 2) == 0
    other = torch.cuda.Stream(1)
    assert call("cudaEventRecord", event, pointer(other.cuda_stream)) == INVALID_HANDLE
    assert call("cudaEventDestroy", event) == 0
    assert call("cudaEventQuery", event) == INVALID_HANDLE


def test_a_kernel_that_uses_freed_memory_ends_the_context() -> None:
    """In a child, since nothing recovers from it."""
    done = cudasim_child("""
x = torch.ones(1 << 20, device="cuda:0")
cudasim.runtime().cudaFree(ctypes.c_void_p(x.data_ptr()))
try:
    x + 1
except RuntimeError as error:
    assert "illegal memory access" in str(error), error
assert cudasim.runtime().cudaDeviceSynchronize() == 700
assert cudasim.runtime().cudaGetLastError() == 700
assert cudasim.runtime().cudaGetLastError() == 700
os._exit(0)
""")
    assert done == 0


def test_a_forked_child_has_no_cuda_once_its_parent_has() -> None:
    torch.cuda.init()
    pid = os.fork()
    if pid == 0:
        os._exit(cudasim.runtime().cudaDeviceSynchronize())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def test_before_the_first_call_the_environment_and_forks_are_free() -> None:
    done = cudasim_child("""
assert not cudasim.initialized(), "torch's import begins CUDA"
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
pid = os.fork()
assert (torch.cuda.device_count(), torch.ones(3, device="cuda").sum().item()) == (1, 3.0)
if pid == 0:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert cudasim.used_bytes(0) == 0, cudasim.used_bytes(0)
assert cudasim.used_bytes(1) > 0
""")
    assert done == 0


@pytest.mark.parametrize(("sticky", "after"), [(False, 0), (True, 719)])
def test_faults_come_on_order(sticky: bool, after: int) -> None:
    done = cudasim_child(f"""
torch.cuda.init()
cudasim.fail("cudaEventCreateWithFlags", 719, nth=2, sticky={sticky})
codes = [cudasim.runtime().cudaEventCreateWithFlags(ctypes.byref(ctypes.c_void_p()), 2) for _ in range(3)]
assert codes == [0, 719, {after}], codes
assert cudasim.runtime().cudaDeviceSynchronize() == {after}
os._exit(0)
""")
    assert done == 0
