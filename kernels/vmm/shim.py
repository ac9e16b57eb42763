"""The vmm route: torch's segments live at addresses that stay while their memory goes away (see vmm.c).

`preload` must run before ``import torch``. The shim then stands in for ``cudaMalloc``, ``cudaFree`` and
``cudaDeviceEnablePeerAccess`` of every library that links the CUDA runtime dynamically, torch's caching
allocator above all.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gpuslice.errors import DeviceMemoryError, EnvironmentUnusableError
from gpuslice.kernels.compiler import shared_library

SOURCE = Path(__file__).with_name("vmm.c")
#: torch reads both names; the second since 2.9.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_OUT_OF_MEMORY = 2


class _BlockInfo(ctypes.Structure):
    _fields_: ClassVar = [
        ("address", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("device", ctypes.c_int32),
        ("mapped", ctypes.c_int32),
    ]


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of device memory that the caching allocator got from the shim.

    Attributes
    ----------
    address
        On the device; the same before a suspend and after the resume.
    nbytes
        The number of bytes that was asked for.
    mapped
        True if physical memory is behind it now.
    """

    address: int
    nbytes: int
    device: int
    mapped: bool

    def holds(self, address: int) -> bool:
        """Return True if a device address is in this block."""
        return self.address <= address < self.address + self.nbytes


def allocator_conflict(environ: Mapping[str, str]) -> str:
    """Return the setting that keeps torch's allocator from calling ``cudaMalloc``, or an empty string."""
    for name in ALLOCATOR_VARIABLES:
        for option in environ.get(name, "").replace(" ", "").split(","):
            key, _, value = option.partition(":")
            if key == "expandable_segments" and value.lower() not in ("false", "0", ""):
                return f"{name}=expandable_segments:{value}"
            if key == "backend" and value not in ("native", ""):
                return f"{name}=backend:{value}"
    return ""


def preload() -> Vmm:
    """Load the shim before the CUDA runtime, and return it. Compile it if this user never did.

    Raises
    ------
    EnvironmentUnusableError
        If torch is imported already, its allocator is set to another backend, or the shim cannot be built.
    """
    global _loaded
    if _loaded is not None:
        return _loaded
    # Not "torch": that name is there as soon as the import begins, before the CUDA runtime is loaded.
    if "torch._C" in sys.modules:
        raise EnvironmentUnusableError(
            "the route vmm needs its shim before torch, which is imported already",
            "start the script with `gpuslice run --route vmm`",
        )
    conflict = allocator_conflict(os.environ)
    if conflict:
        raise EnvironmentUnusableError(
            f"the route vmm cannot work with {conflict}", "unset it, or use --route tensor"
        )
    _loaded = Vmm(shared_library(SOURCE))
    return _loaded


def loaded() -> Vmm:
    """Return the shim that `preload` put into this process.

    Raises
    ------
    EnvironmentUnusableError
        If it did not.
    """
    if _loaded is None:
        raise EnvironmentUnusableError(
            "the memory shim of the route vmm is not in this process",
            "start it with `gpuslice run --route vmm`",
        )
    return _loaded


class Vmm:
    """The loaded shim: lists blocks of device memory, releases their memory and takes it back.

    Parameters
    ----------
    library
        The compiled shim.

    Notes
    -----
    Nothing may use a block between ``release`` and the end of ``reserve``, after which it holds anything.
    """

    def __init__(self, library: Path) -> None:
        try:
            shim = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise EnvironmentUnusableError(f"cannot load {library}: {error}", "remove that file") from error
        shim.gpuslice_vmm_blocks.restype = ctypes.c_size_t
        shim.gpuslice_vmm_message.restype = ctypes.c_char_p
        self._shim = shim

    def blocks(self, device: int) -> list[Block]:
        """Return all blocks of a device, sorted by address."""
        room = 0
        while True:
            infos = (_BlockInfo * room)()
            count = self._shim.gpuslice_vmm_blocks(infos, ctypes.c_size_t(room))
            if count <= room:
                break
            room = count
        found = [
            Block(i.address, i.nbytes, i.device, bool(i.mapped)) for i in infos[:count] if i.device == device
        ]
        return sorted(found, key=lambda block: block.address)

    def release(self, device: int) -> None:
        """Release the memory of all blocks of a device. Their addresses stay reserved."""
        self._check(self._shim.gpuslice_vmm_release(device))

    def reserve(self, device: int) -> None:
        """Map new memory behind all blocks of a device, or behind none and raise ``DeviceMemoryError``."""
        self._check(self._shim.gpuslice_vmm_reserve(device))

    def _check(self, code: int) -> None:
        """Raise the matching error if the shim returned a code other than 0."""
        if code == 0:
            return
        said = self._shim.gpuslice_vmm_message().decode()
        if code == _OUT_OF_MEMORY:
            raise DeviceMemoryError(
                f"the device lacks memory ({said})", "let another job be suspended first, then resume again"
            )
        raise EnvironmentUnusableError(f"the vmm route failed: {said}", "use --route tensor")


#: One per process: the dynamic linker never unloads the symbols that it has bound.
_loaded: Vmm | None = None
