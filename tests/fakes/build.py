"""Builds the fake NVIDIA libraries of this folder, and runs Python under them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gpuslice.kernels.compiler import find_compiler

from ..patience import PATIENCE_S

FAKES = Path(__file__).resolve().parent
#: What scenarios of the vmm route begin with: first the shim, then the runtime and a library linked to it.
SHIM_PREAMBLE = """
import ctypes, os
from gpuslice.errors import DeviceMemoryError, EnvironmentUnusableError
from gpuslice.kernels.vmm.shim import preload

shim = preload()
consumer = ctypes.CDLL("libconsumer.so")
runtime = ctypes.CDLL("libcudart.so.13")
cuda = ctypes.CDLL("libcuda.so.1")
cuda.fake_live_bytes.restype = ctypes.c_uint64
MIB = 1 << 20

def take(nbytes, byte=0, device=0):
    runtime.cudaSetDevice(device)
    address = ctypes.c_void_p()
    code = consumer.take(ctypes.byref(address), ctypes.c_size_t(nbytes))
    if code:
        return -code
    if nbytes:
        consumer.fill(address, byte, ctypes.c_size_t(nbytes))
    return address.value

def give(address):
    return consumer.give(ctypes.c_void_p(address))

def bytes_at(address, nbytes):
    return ctypes.string_at(address, nbytes)

"""


def build(directory: Path, source: str, output: str, *flags: str) -> Path:
    """Compile one of the fakes into ``directory``; skips the test where there is no compiler."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C compiler here to build the fake NVIDIA libraries")
    target = directory / output
    command = [*compiler, "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]
    command += [f"-Wl,-soname,{output}", "-o", str(target), str(FAKES / source), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return target


def python(code: str, libraries: Path | None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a Python that finds the libraries in that directory first."""
    if libraries is not None:
        environ["LD_LIBRARY_PATH"] = str(libraries)
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
