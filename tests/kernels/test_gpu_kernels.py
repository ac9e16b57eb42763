"""The GPU kernels three ways: as host code against NumPy, compiled for every GPU, run on one."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpuslice.kernels import gpu_kernels
from gpuslice.kernels.gpu_kernels import PIECE, GpuKernels, digest_reference

from ..fakes.build import DEADLINE_S, FAKES

ARCHITECTURES = ["sm_75", "sm_80", "sm_90", "sm_100"]
#: (blocks per piece, pieces at a time, threads per block): fewer than the work, and more.
GRIDS = [(1, 1, 1), (3, 2, 32), (64, 9, 64)]
#: Empty, a byte, around the vector width, unaligned, and several rounds of the largest grid.
SIZES = [0, 1, 15, 16, 17, 1000, 70_001]


def nvcc() -> str | None:
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(home / "bin"))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here to build the kernels for the host")
    library = tmp_path_factory.mktemp("kernels") / "kernels.so"
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    command += [f"-I{gpu_kernels.SOURCES[0].parent}", f"-I{FAKES}", str(FAKES / "kernels_on_host.cpp")]
    done = subprocess.run(
        [*command, "-o", str(library)], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def table(
    memory: npt.NDArray[np.uint8], shift: int
) -> tuple[npt.NDArray[np.void], list[tuple[int, int, int]]]:
    """Pieces of ``memory`` at places ``shift`` bytes off alignment; the table, and (start, offset, size)."""
    places, start, offset = [], 0, 0
    for size in SIZES:
        places.append((start + shift, offset, size))
        start += -(-(size + shift) // 256) * 256
        offset += -(-size // 256) * 256
    base = memory.ctypes.data
    return np.array([(base + start, offset, size) for start, offset, size in places], dtype=PIECE), places


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("shift", [0, 5])
def test_gather_and_scatter_against_numpy(host: ctypes.CDLL, grid: tuple[int, int, int], shift: int) -> None:
    memory = np.random.default_rng(1).integers(0, 256, 100_000, dtype=np.uint8)
    before = memory.copy()
    pieces, places = table(memory, shift)
    staging = np.full(100_000, 0xEE, dtype=np.uint8)
    expected = staging.copy()
    for start, offset, size in places:
        expected[offset : offset + size] = memory[start : start + size]
    pointers = (ctypes.c_void_p(pieces.ctypes.data), len(pieces), ctypes.c_void_p(staging.ctypes.data))
    host.host_gather(*grid, *pointers)
    np.testing.assert_array_equal(staging, expected)
    for start, _, size in places:
        memory[start : start + size] = 0
    host.host_scatter(*grid, *pointers)
    np.testing.assert_array_equal(memory, before)


@pytest.mark.parametrize("grid", [(1, 1), (2, 32), (9, 64)])
@pytest.mark.parametrize("nbytes", [0, 1, 8, 63, 64, 65, 4096, 10_003])
def test_digests_against_numpy(host: ctypes.CDLL, grid: tuple[int, int], nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    expected = digest_reference(data, 64)
    digests = np.zeros(-(-nbytes // 64), dtype=np.uint64)
    sizes = (ctypes.c_uint64(nbytes), ctypes.c_uint64(64))
    host.host_digest(*grid, ctypes.c_void_p(data.ctypes.data), *sizes, ctypes.c_void_p(digests.ctypes.data))
    np.testing.assert_array_equal(digests, expected)


def test_a_digest_sees_every_bit_order_and_length() -> None:
    data = np.zeros(64, dtype=np.uint8)
    seen = {int(digest_reference(data[:n], 64)[0]) for n in range(1, 65)}
    for bit in range(64 * 8):
        flipped = data.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        seen.add(int(digest_reference(flipped, 64)[0]))
    assert len(seen) == 64 + 64 * 8
    words = np.arange(8, dtype="<u8")
    swapped = words[[1, 0, *range(2, 8)]]
    assert digest_reference(words.view(np.uint8), 64) != digest_reference(swapped.view(np.uint8), 64)


def test_a_changed_byte_changes_its_chunk_only() -> None:
    data = np.random.default_rng(3).integers(0, 256, 1000, dtype=np.uint8)
    before = digest_reference(data, 128)
    data[300] ^= 1
    assert list(np.flatnonzero(before != digest_reference(data, 128))) == [2]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_they_compile_for(architecture: str, tmp_path: Path) -> None:
    compiler = nvcc()
    if compiler is None:
        pytest.skip("no nvcc here")
    source = tmp_path / "kernels.cu"
    source.write_text("\n".join(path.read_text(encoding="utf-8") for path in gpu_kernels.SOURCES))
    command = [compiler, "-std=c++17", "-cubin", f"-arch={architecture}", "-Werror=all-warnings"]
    command += ["-o", str(tmp_path / "kernels.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_on_a_gpu() -> None:
    pytest.importorskip("cupy")
    kernels = GpuKernels()
    tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8, device="cuda") for n in SIZES if n]
    offsets = [256 * 300 * i for i in range(len(tensors))]
    staging = torch.zeros(offsets[-1] + max(SIZES), dtype=torch.uint8, device="cuda")
    pieces = [(t.data_ptr(), offset, t.numel()) for t, offset in zip(tensors, offsets, strict=True)]
    torch.cuda.synchronize()
    kernels.gather(pieces, staging.data_ptr())
    digests = kernels.digest(staging.data_ptr(), staging.numel(), 4096)
    np.testing.assert_array_equal(digests, digest_reference(staging.cpu().numpy(), 4096))
    expected = [tensor.clone() for tensor in tensors]
    for tensor, offset in zip(tensors, offsets, strict=True):
        assert torch.equal(staging[offset : offset + tensor.numel()], tensor)
        tensor.zero_()
    torch.cuda.synchronize()
    kernels.scatter(pieces, staging.data_ptr())
    torch.cuda.synchronize()
    assert all(torch.equal(tensor, was) for tensor, was in zip(tensors, expected, strict=True))
