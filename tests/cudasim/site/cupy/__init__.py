"""As much of CuPy as gpuslice uses, over the simulated runtime.

A module is compiled for the host by g++ where CuPy has NVRTC; its kernels run in stream order.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Protocol

import cudasim
import numpy as np

__version__ = "0+simulated"
_NATIVE = cudasim.FOLDER.parent / "native"
_HOST = cudasim.FOLDER.parents[1] / "fakes"
_current: list[int] = []
#: ``cudaMemcpyDeviceToHost``
_TO_HOST = 2


class CompileException(Exception):
    """The compiler refuses the code."""


class _Foreign(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...


class _Exporting(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class _Kernel:
    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._launch = getattr(library, f"cudasim_launch_{name}")

    def __call__(self, grid: tuple[int, int], block: tuple[int], args: tuple[object, ...]) -> None:
        table, count, target = (int(value) for value in args)  # type: ignore[call-overload]
        stream = ctypes.c_void_p(_current[-1] if _current else 0)
        code = self._launch(
            *grid, *block, ctypes.c_void_p(table), ctypes.c_uint(count), ctypes.c_void_p(target), stream
        )
        if code:
            raise RuntimeError(f"CUDADriverError: launch failed with CUDA error {code}")


class RawModule:
    """CUDA source, compiled when the first kernel is asked for."""

    def __init__(self, code: str, options: tuple[str, ...] = ()) -> None:
        self._code = code
        self._library: ctypes.CDLL | None = None

    def get_function(self, name: str) -> _Kernel:
        if self._library is None:
            self._library = ctypes.CDLL(str(_compiled(self._code)))
        return _Kernel(self._library, name)


def _compiled(code: str) -> Path:
    """The library of this code, made once for all processes."""
    wrapper = (_NATIVE / "kernels.cpp").read_text(encoding="utf-8")
    source = f'#include "cuda_host.h"\n{code}\n{wrapper}'
    folder = Path(os.environ["CUDASIM_LIBRARIES"]) / "kernels"
    folder.mkdir(exist_ok=True)
    library = folder / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        draft = library.with_suffix(f".{os.getpid()}")
        command = [
            "g++",
            "-std=c++17",
            "-O2",
            "-fPIC",
            "-shared",
            f"-I{_HOST}",
            "-x",
            "c++",
            "-",
            "-o",
            str(draft),
        ]
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileException(done.stderr)
        draft.rename(library)
    return library


class _Stream:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    @classmethod
    def from_external(cls, foreign: _Foreign) -> _Stream:
        return cls(foreign.__cuda_stream__()[1])

    def __enter__(self) -> None:
        _current.append(self._handle)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.pop()


class ndarray:
    """Device memory of somebody else's, whom it keeps alive; it goes by the address that it was told."""

    def __init__(self, owner: _Exporting) -> None:
        self._owner = owner
        self._interface = {**owner.__cuda_array_interface__}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._interface

    def get(self) -> np.ndarray:
        """What lies at the address now, of an array without strides."""
        interface = self._interface
        found = np.empty(interface["shape"], interface["typestr"])
        source = ctypes.c_void_p(interface["data"][0])
        code = cudasim.runtime().cudaMemcpy(
            ctypes.c_void_p(found.ctypes.data), source, ctypes.c_size_t(found.nbytes), _TO_HOST
        )
        if code:
            raise RuntimeError(f"CUDARuntimeError: CUDA error {code}")
        return found


def asarray(owner: _Exporting) -> ndarray:
    """A view of whatever has ``__cuda_array_interface__``."""
    return ndarray(owner)


cuda = SimpleNamespace(Stream=_Stream, compiler=SimpleNamespace(CompileException=CompileException))
