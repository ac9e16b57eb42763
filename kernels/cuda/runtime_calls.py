"""Calls of the CUDA runtime that torch uses and does not show: one funnel, by ctypes into the same library.

Where the library cannot be found by its name (some builds of torch link it statically), they are missing, and
callers do with what torch offers.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

#: ``cudaStreamNonBlocking``: it does not wait for the default stream, nor that one for it.
_NON_BLOCKING = 1
#: ``cudaStreamCaptureModeRelaxed``: what this thread calls is no matter of captures in other threads.
_RELAXED = 2
#: ``CUDA_ERROR_NOT_INITIALIZED``
_NOT_INITIALIZED = 3


#: The GPU on which this process computes from the moment when it begins CUDA, if somebody named one.
_home: list[int] = []


def has_begun() -> bool:
    """Whether the script has begun CUDA in this process. Nobody else should: it cannot be taken back."""
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call, no-any-return]


def count_gpus() -> int | None:
    """How many GPUs this process sees; ``None`` if only CUDA could tell, which the script has not begun.

    Torch's own functions ask CUDA then, after which forks cannot use it any more.
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


#: ``CUDA_VISIBLE_DEVICES`` as it is to be when CUDA begins, if somebody said so.
_shown: list[str] = []
#: What of torch makes the driver read the variable.
_BEGINNINGS = ("_cuda_init", "_cuda_getDeviceCount")


def show_gpus(variable: str, value: str, keep: Callable[[str], bool]) -> None:
    """Have CUDA begin with this value of its variable, whatever the script sets it to before.

    ``keep`` tells a value of the script's that is obeyed all the same.
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
    """Whether the driver has read what this process shows it, for torch or anybody else. Begins nothing."""
    if has_begun():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The runtime that torch has loaded; asked for by its name, and never loaded anew."""
    major = (torch.version.cuda or "").split(".")[0]
    try:
        return ctypes.CDLL(f"libcudart.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_LAZY) if major else None
    except OSError:
        return None


def spend_error() -> bool:
    """Take away the error that a failed call has left in this thread; whether that could be done."""
    library = _library()
    if library is not None:
        library.cudaGetLastError()
    return library is not None


@contextmanager
def outside_captures() -> Iterator[None]:
    """Nothing that this thread calls in the block invalidates a graph that another thread is capturing."""
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
    """Call for one GPU, from whatever thread: its context, and no captured graph is the worse for it."""
    with torch.cuda.device(index), outside_captures():
        yield


#: Streams that this package has made, by their pointers.
own_streams: set[int] = set()


def make_stream(index: int) -> torch.cuda.Stream:
    """A stream of its own; torch's constructor would make the whole pool of streams, 128 of them."""
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
