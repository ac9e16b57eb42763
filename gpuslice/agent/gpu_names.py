"""The replacement of a script's GPU number by the GPU that its job has after a move.

A script that names ``cuda:0`` in its loop still does so on another GPU, and torch's numbers cannot change in
a process that has begun CUDA. So functions that take a device get the present GPU instead, and functions that
take a generator of the first GPU draw its numbers on the present GPU. Only a job that is away from its first
GPU pays for this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils import _device

from gpuslice.errors import hide_own_frames
from gpuslice.kernels.cuda import runtime_calls
from gpuslice.types import DeviceName

#: Functions that take a GPU as a bare number.
_BY_NUMBER = (torch.Tensor.to, torch.Tensor.cuda)
#: Functions of torch that set a thread's current GPU by number, and the modules that hold them.
_CURRENT_DEVICE = (
    (torch._C, "_cuda_setDevice"),
    (torch.cuda, "_exchange_device"),
    (torch.cuda, "_maybe_exchange_device"),
)


class GpuNames(TorchFunctionMode):
    """A mode of torch that replaces the GPU that the script names by the GPU that the job has now."""

    def __init__(self) -> None:
        super().__init__()
        self._named: int | None = None
        self._present = torch.device("cuda", 0)
        self._home = 0
        self._installed = False
        #: A generator of the present GPU, which draws for the script's generators of the first GPU.
        self._substitute_generator: torch.Generator | None = None
        self._threads = threading.local()

    def pause(self) -> None:
        """Stop replacing GPU names, until `follow`."""
        self._named = None

    def follow(self, named: DeviceName, present: DeviceName) -> None:
        """Replace the GPU ``named`` by the GPU ``present`` from now on."""
        if named.kind != "cuda":
            return
        self._present = torch.device("cuda", present.index or 0)
        if named == present:
            return
        self._named = named.index
        if not self._installed:
            self._installed = True
            self._home = named.index or 0
            _push_below(self)
            self._follow_current_device()

    def _follow_current_device(self) -> None:
        """Wrap torch's functions that set the current GPU. They take no tensors: modes do not see them."""

        def following(call: Callable[[int], Any]) -> Callable[[int], Any]:
            return lambda index: call(self._number(index))

        for module, name in _CURRENT_DEVICE:
            if hasattr(module, name):
                setattr(module, name, following(getattr(module, name)))

    def _number(self, index: int) -> int:
        return self._present.index if index == self._named else index

    def in_other_threads(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call ``func`` with replaced GPU names, in a thread of the script other than the main thread.

        Each thread has a current GPU of its own, which is set first.
        """
        if not self._installed:
            return func(*args, **kwargs)
        index = self._present.index
        # A fork, such as a worker of a DataLoader, has this mode, too, but cannot use CUDA.
        if runtime_calls.has_begun() and getattr(self._threads, "index", self._home) != index:
            torch.cuda.set_device(index)
            self._threads.index = index
        return self.__torch_function__(func, types, args, kwargs)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        try:
            return self._call(func, args, kwargs or {})
        except BaseException as error:
            hide_own_frames(error)
            raise

    def _call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._named is None:
            return func(*args, **kwargs)
        by_number = func in _BY_NUMBER
        given = {name: self._renamed(value, by_number=by_number) for name, value in kwargs.items()}
        if given.get("device") is None and self._by_default(func):
            given["device"] = self._present
        values = [self._renamed(value, by_number=by_number) for value in args]
        own = [one for one in (*args, *kwargs.values()) if self._is_left_behind(one)]
        result = self._drawing(own[0], func, values, given) if own else func(*values, **given)
        return self._renamed(result, by_number=False) if func is torch.device else result

    def _is_left_behind(self, value: Any) -> bool:
        """Return True if ``value`` is a generator of the GPU that the script names and the job has left."""
        if not isinstance(value, torch.Generator):
            return False
        return value.device.type == "cuda" and value.device.index == self._named

    def _drawing(
        self, own: torch.Generator, func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Call ``func`` with a generator of the present GPU instead of ``own``. Advance ``own`` as far."""
        if self._substitute_generator is None or self._substitute_generator.device != self._present:
            self._substitute_generator = torch.Generator(self._present)
        substitute = self._substitute_generator
        substitute.set_state(own.get_state())
        values = [substitute if value is own else value for value in args]
        try:
            return func(*values, **{name: substitute if it is own else it for name, it in kwargs.items()})
        finally:
            own.set_state(substitute.get_state())

    def _renamed(self, value: Any, *, by_number: bool) -> Any:
        if isinstance(value, torch.device):
            return self._present if value.type == "cuda" and value.index == self._named else value
        if isinstance(value, str):
            return str(self._present) if value == f"cuda:{self._named}" else value
        if by_number and type(value) is int:
            return self._present if value == self._named else value
        return value

    def _by_default(self, func: Callable[..., Any]) -> bool:
        """Return True if ``func`` makes a tensor on a GPU that the script set as the default by number."""
        default = _device.CURRENT_DEVICE
        return (
            default is not None
            and default.type == "cuda"
            and default.index == self._named
            and func in _device._device_constructors()
        )


def _push_below(mode: TorchFunctionMode) -> None:
    """Push ``mode`` below all modes that a script may leave.

    The mode of ``torch.set_default_device`` stays at the bottom, where torch expects it.
    """
    modes = [_pop_mode() for _ in range(_len_torch_function_stack())]  # type: ignore[no-untyped-call]
    if modes and modes[-1] is getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None):
        _push_mode(modes.pop())  # type: ignore[no-untyped-call]
    _push_mode(mode)  # type: ignore[no-untyped-call]
    for above in reversed(modes):
        _push_mode(above)  # type: ignore[no-untyped-call]
