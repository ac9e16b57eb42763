"""Loads of one kind on the current GPU, made with CuPy. Each call of a unit waits until the GPU is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

_SOURCE = r"""
extern "C" __global__ void compute(float* out, int rounds) {
    float a = threadIdx.x, b = a + 1.0f, c = a + 2.0f, d = a + 3.0f;
    for (int i = 0; i < rounds; ++i) {
        a = a * 0.999999f + 1e-6f; b = b * 0.999999f + 1e-6f;
        c = c * 0.999999f + 1e-6f; d = d * 0.999999f + 1e-6f;
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = a + b + c + d;
}
extern "C" __global__ void stream(float* to, const float* one, const float* other, long long count) {
    long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride)
        to[i] = one[i] + 3.0f * other[i];
}
extern "C" __global__ void visit(unsigned* buffer, unsigned mask, int rounds) {
    unsigned state = blockIdx.x * blockDim.x + threadIdx.x + 1;
    for (int i = 0; i < rounds; ++i) {
        state = state * 1664525u + 1013904223u;
        atomicAdd(&buffer[(state >> 4) & mask], 1u);
    }
}
"""
_THREADS = 256
_BLOCKS_A_MULTIPROCESSOR = 8
_COMPUTE_ROUNDS, _CACHE_ROUNDS = 20_000, 256
_STREAM_FLOATS, _COPY_BYTES = 32 << 20, 16 << 20


def _blocks() -> int:
    return int(cupy.cuda.Device().attributes["MultiProcessorCount"]) * _BLOCKS_A_MULTIPROCESSOR


def _kernel(name: str) -> Any:
    return cupy.RawKernel(_SOURCE, name)


def _finished(launch: Callable[[], object]) -> Callable[[], None]:
    stream = cupy.cuda.Stream(non_blocking=True)

    def unit() -> None:
        with stream:
            launch()
        stream.synchronize()

    return unit


def _compute_unit() -> Callable[[], None]:
    kernel, blocks = _kernel("compute"), _blocks()
    out = cupy.zeros(blocks * _THREADS, dtype=cupy.float32)
    return _finished(lambda: kernel((blocks,), (_THREADS,), (out, np.int32(_COMPUTE_ROUNDS))))


def _bandwidth_unit() -> Callable[[], None]:
    kernel, blocks = _kernel("stream"), _blocks()
    to, one, other = (cupy.ones(_STREAM_FLOATS, dtype=cupy.float32) for _ in range(3))
    return _finished(lambda: kernel((blocks,), (_THREADS,), (to, one, other, np.int64(_STREAM_FLOATS))))


def _cache_unit() -> Callable[[], None]:
    kernel, blocks = _kernel("visit"), _blocks()
    size = int(cupy.cuda.Device().attributes["L2CacheSize"]) // 4
    count = 1 << (size.bit_length() - 1)
    buffer = cupy.zeros(count, dtype=cupy.uint32)
    return _finished(
        lambda: kernel((blocks,), (_THREADS,), (buffer, np.uint32(count - 1), np.int32(_CACHE_ROUNDS)))
    )


def _pcie_unit() -> Callable[[], None]:
    pinned = cupy.cuda.alloc_pinned_memory(_COPY_BYTES)
    host = np.frombuffer(pinned, dtype=np.uint8, count=_COPY_BYTES)
    there = cupy.empty(_COPY_BYTES, dtype=cupy.uint8)

    def copies() -> None:
        there.set(host)
        there.get(out=host, blocking=False)

    return _finished(copies)


#: Makes a unit of each kind of load.
STRESSORS: dict[str, Callable[[], Callable[[], None]]] = {
    "bandwidth": _bandwidth_unit,
    "compute": _compute_unit,
    "cache": _cache_unit,
    "pcie": _pcie_unit,
}
