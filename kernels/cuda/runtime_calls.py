"""Calls of the CUDA runtime that torch uses and does not show, by ctypes into the library torch has loaded.

If the library is not found by its name (some builds of torch link it statically), the calls are missing, and
callers use what torch offers.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

#: ``cudaStreamNonBlocking``: such a stream and the default stream do not wait for each other.
_NON_BLOCKING = 1
#: ``cudaStreamCaptureModeRelaxed``: calls of this thread do not affect captures in other threads.
_RELAXED = 2
#: ``CUDA_ERROR_NOT_INITIALIZED``
_NOT_INITIALIZED = 3


#: The GPU on which this process computes once CUDA begins, if `compute_on` named one.
_home: list[int] = []


def has_begun() -> bool:
    """Return True if CUDA has begun in this process. Only the script should begin it: that is final."""
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call, no-any-return]


def count_gpus() -> int | None:
    """Return how many GPUs this process sees; None if only CUDA could tell, and it has not begun.

    Torch's own function would then begin CUDA, and forked children could not use it any more.
    """
    if not torch.version.cuda:
        return 0
    if has_begun():
        return torch.cuda.device_count()
    by_nvml: Callable[[], int] = getattr(torch.cuda, "_device_count_nvml", lambda: -1)
    count = by_nvml()
    return count if count >= 0 else None


def compute_on(index: int) -> None:
    """Make a GPU the current one: at once, or when the script begins CUDA."""
    if not _home:
        _home.append(index)
        torch.cuda._lazy_call(lambda: torch.cuda.set_device(_home[0]))  # type: ignore[no-untyped-call]
    elif has_begun():
        torch.cuda.set_device(index)
    _home[0] = index


#: The value of ``CUDA_VISIBLE_DEVICES`` when CUDA begins, if `show_gpus` set one.
_shown: list[str] = []
#: Functions of torch that make the driver read the variable.
_BEGINNINGS = ("_cuda_init", "_cuda_getDeviceCount")


def show_gpus(variable: str, value: str, keep: Callable[[str], bool]) -> None:
    """Make CUDA begin with this value of its variable, whatever the script sets before.

    ``keep`` returns True for a value of the script's that is used all the same.
    """
    os.environ[variable] = value
    first = not _shown
    _shown[:] = [value]
    if not first:
        return

    def beginning(begin: Callable[[], object]) -> Callable[[], object]:
        def show_and_begin() -> object:
            if not keep(os.environ.get(variable, value)):
                os.environ[variable] = _shown[0]
            return begin()

        return show_and_begin

    for name in _BEGINNINGS:
        if hasattr(torch._C, name):
            setattr(torch._C, name, beginning(getattr(torch._C, name)))


def driver_has_begun() -> bool:
    """Return True if the driver has read its environment, for torch or other code. Begins nothing."""
    if has_begun():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the CUDA runtime that torch has loaded, or None. It is never loaded anew."""
    major = (torch.version.cuda or "").split(".")[0]
    try:
        return ctypes.CDLL(f"libcudart.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_LAZY) if major else None
    except OSError:
        return None


def spend_error() -> bool:
    """Clear the error that a failed call has left in this thread. Return True if that was possible."""
    library = _library()
    if library is not None:
        library.cudaGetLastError()
    return library is not None


@contextmanager
def outside_captures() -> Iterator[None]:
    """Keep this thread's calls in the block from invalidating graphs that other threads are capturing."""
    library = _library()
    if library is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@contextmanager
def on_gpu(index: int) -> Iterator[None]:
    """Make a GPU current inside the block, from any thread, without invalidating a graph being captured."""
    with torch.cuda.device(index), outside_captures():
        yield


#: Streams that this package has made, by their pointers.
own_streams: set[int] = set()


def make_stream(index: int) -> torch.cuda.Stream:
    """Return a new stream. torch's constructor would make its whole pool of 128 streams."""
    library, pointer = _library(), ctypes.c_void_p()
    create = None if library is None else library.cudaStreamCreateWithPriority
    with torch.cuda.device(index):
        if create is None or create(ctypes.byref(pointer), _NON_BLOCKING, 0) != 0:
            spend_error()
            stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        else:
            stream = torch.cuda.ExternalStream(pointer.value or 0, index)  # type: ignore[no-untyped-call]
    own_streams.add(stream.cuda_stream)
    return stream
