"""The simulated CUDA runtime from Python: loaded into every process that imports torch, steered by tests.

``load`` is called at the end of ``import torch`` (entry point group ``torch.backends``), so that scripts and
child processes need nothing.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import cudasim_tally

#: ``cudaError_t``
OUT_OF_MEMORY, ILLEGAL_ADDRESS, LAUNCH_FAILURE = 2, 700, 719
#: In place of a code: SIGKILL at that call.
KILLED = -9
FOLDER = Path(__file__).resolve().parent


@functools.cache
def runtime() -> ctypes.CDLL:
    """The runtime that torch uses, or would use."""
    library = ctypes.CDLL("libcudart.so.13")
    for name in ("calls", "bytes", "locked_bytes", "used_bytes"):
        getattr(library, f"cudasim_{name}").restype = ctypes.c_uint64
    library.cudasim_counts.restype = ctypes.c_size_t
    return library


def runtime_path() -> Path:
    """Of the runtime library that processes load."""
    return Path(os.environ["CUDASIM_LIBRARIES"]) / "libcudart.so.13"


def load() -> None:
    """Put the stand-ins for PyTorch's kernels into this process."""
    if cudasim_tally.TALLY in os.environ:
        sys.meta_path.insert(0, cudasim_tally.SwitchCounter())  # type: ignore[arg-type]
    library = ctypes.CDLL("libcudasim_operators.so")
    library.cudasim_install.restype = ctypes.c_size_t
    if library.cudasim_install() < 1000:
        raise ImportError("cudasim: too few operators are replaced; was torch built without CUDA?")


def fail(name: str, code: int, *, nth: int = 1, sticky: bool = False) -> None:
    """Have the ``nth`` call of that name from now on fail; sticky: all calls after it, too."""
    runtime().cudasim_fail(name.encode(), ctypes.c_uint64(nth), code, int(sticky))


def forget_faults() -> None:
    """Withdraw what was ordered and has not happened yet."""
    runtime().cudasim_forget_faults()


def counts() -> dict[str, int]:
    """Calls by name, and bytes copied as ``d2h_bytes``, ``h2d_bytes``, ``d2d_bytes``, ``h2h_bytes``."""
    room = runtime().cudasim_counts(None, ctypes.c_size_t(0)) + 4096
    text = ctypes.create_string_buffer(room)
    runtime().cudasim_counts(text, ctypes.c_size_t(room))
    return {name: int(number) for name, number in map(str.split, text.value.decode().splitlines())}


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """A dictionary that has, once the block is over, what the calls and bytes in it were."""
    found: dict[str, int] = {}
    before = counts()
    yield found
    found |= since(before)


def since(before: Mapping[str, int]) -> dict[str, int]:
    """What was called and copied since ``before = counts()``."""
    return {name: n - before.get(name, 0) for name, n in counts().items() if n != before.get(name, 0)}


@contextmanager
def held(stream: int) -> Iterator[None]:
    """Meanwhile a stream carries out nothing; its work goes on afterwards."""
    code = runtime().cudasim_hold(ctypes.c_void_p(stream), 1)
    if code:
        raise ValueError(f"no stream {stream:#x} (CUDA error {code})")
    try:
        yield
    finally:
        runtime().cudasim_hold(ctypes.c_void_p(stream), 0)


def used_bytes(physical: int = 0) -> int:
    """Memory of a GPU that is taken by living processes."""
    return int(runtime().cudasim_used_bytes(physical))


def locked_bytes() -> int:
    """Host memory that this process has page-locked."""
    return int(runtime().cudasim_locked_bytes())


def has_context(device: int) -> bool:
    """Whether this process has begun to use a device."""
    return bool(runtime().cudasim_has_context(device))


def initialized() -> bool:
    """Whether this process has called CUDA at all."""
    return bool(runtime().cudasim_initialized())
