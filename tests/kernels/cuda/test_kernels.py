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

from gpuslice.kernels.cuda import kernels
from gpuslice.kernels.cuda.kernels import PIECE, GpuKernels, combine, shape_of, table

from ...fakes.host_engine import build_kernels
from ...patience import PATIENCE_S
from ..checksums import checksum_reference, padded

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
    return build_kernels(tmp_path_factory.mktemp("kernels"))


def scattered(
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
    pieces, places = scattered(memory, shift)
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


#: Data and length: only zeros, parts of a stripe and of a block, whole ones, blocks of zeros at the end.
LENGTHS = [(0, 256), (1, 256), (255, 256), (256, 256), (700, 1024), (1024, 1024), (1025, 1280), (5000, 8192)]
LENGTHS += [(1 << 16, 1 << 16), ((1 << 16) - 1, 1 << 16), (70_001, 73_728)]


@pytest.mark.parametrize("grid", GRIDS)
def test_checksums_are_those_of_xxhash(host: ctypes.CDLL, grid: tuple[int, int, int]) -> None:
    memory = np.random.default_rng(2).integers(0, 256, 300_000, dtype=np.uint8)
    base = memory.ctypes.data + -memory.ctypes.data % 16
    starts = np.cumsum([0, *(length + 16 for _, length in LENGTHS)]) + base - memory.ctypes.data
    rows = [
        (memory.ctypes.data + start, length, size)
        for start, (size, length) in zip(starts, LENGTHS, strict=False)
    ]
    pieces, words = np.array(rows, dtype=PIECE), np.zeros(2 * len(rows), dtype=np.uint64)
    pointers = (ctypes.c_void_p(pieces.ctypes.data), len(pieces), ctypes.c_void_p(words.ctypes.data))
    host.host_checksum(*grid, *pointers)
    assert combine(words) == [
        checksum_reference(memory[start : start + size].tobytes(), length)
        for start, (size, length) in zip(starts, LENGTHS, strict=False)
    ]


def test_there_are_enough_blocks_for_the_largest_piece_and_no_more_than_a_grid_has() -> None:
    assert shape_of("gather", [(0, 0, 4)]) == ((1, 1), 256)
    assert shape_of("gather", [(0, 0, 1), (0, 0, 1 << 20), (0, 0, 5)]) == ((64, 3), 256)
    assert shape_of("gather", [(0, 0, 40_000)]) == ((3, 1), 256)
    assert shape_of("gather", [(0, 0, 1)] * 70_000) == ((1, 65_535), 256)
    assert shape_of("checksum", []) == ((1, 1), 32)
    assert shape_of("checksum", [(0, 0, 1)] * 9) == ((2, 1), 32)


@pytest.mark.parametrize(
    "architecture",
    [
        ARCHITECTURES[0],
        *(pytest.param(name, marks=pytest.mark.repeats) for name in ARCHITECTURES[1:-1]),
        ARCHITECTURES[-1],
    ],
)
def test_they_compile_for(architecture: str, tmp_path: Path) -> None:
    compiler = nvcc()
    if compiler is None:
        pytest.skip("no nvcc here")
    source = tmp_path / "kernels.cu"
    source.write_text("\n".join(path.read_text(encoding="utf-8") for path in kernels.SOURCES))
    command = [compiler, "-std=c++17", "-cubin", f"-arch={architecture}", "-Werror=all-warnings"]
    command += ["-o", str(tmp_path / "kernels.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_on_a_gpu() -> None:
    pytest.importorskip("cupy")
    kernels = GpuKernels()
    stream = torch.cuda.Stream()
    handle = stream.cuda_stream
    tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8, device="cuda") for n in SIZES if n]
    offsets = [256 * 300 * i for i in range(len(tensors))]
    staging = torch.zeros(offsets[-1] + max(SIZES), dtype=torch.uint8, device="cuda")
    pieces = [(t.data_ptr(), offset, t.numel()) for t, offset in zip(tensors, offsets, strict=True)]
    rows = torch.from_numpy(table(pieces)).cuda()
    words = torch.zeros(2 * len(pieces), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    kernels.launch("gather", rows.data_ptr(), pieces, staging.data_ptr(), handle)
    summed = [(tensor.data_ptr(), padded(tensor.numel()), tensor.numel()) for tensor in tensors]
    summed_rows = torch.from_numpy(table(summed)).cuda()
    torch.cuda.synchronize()
    kernels.launch("checksum", summed_rows.data_ptr(), summed, words.data_ptr(), handle)
    stream.synchronize()
    assert combine(words.cpu().numpy().view(np.uint64)) == [
        checksum_reference(tensor.cpu().numpy().tobytes()) for tensor in tensors
    ]
    expected = [tensor.clone() for tensor in tensors]
    for tensor, offset in zip(tensors, offsets, strict=True):
        assert torch.equal(staging[offset : offset + tensor.numel()], tensor)
        tensor.zero_()
    torch.cuda.synchronize()
    kernels.launch("scatter", rows.data_ptr(), pieces, staging.data_ptr(), handle)
    stream.synchronize()
    assert all(torch.equal(tensor, was) for tensor, was in zip(tensors, expected, strict=True))
