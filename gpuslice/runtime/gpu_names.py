"""After a move, the number by which a script names its GPU means the one that it has now.

A script that says ``cuda:0`` in its loop goes on saying so on another GPU, and torch's numbers cannot change
in a process that has begun CUDA. So functions that take a device get the present one for it. Only a job that
is away from its first GPU pays for that, and only its main thread, which has the loop, is heard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils import _device

from gpuslice.types import DeviceName

#: They take a GPU's number as it is.
_BY_NUMBER = (torch.Tensor.to, torch.Tensor.cuda)


class GpuNames(TorchFunctionMode):
    """Puts the present GPU in the place of the one that the script names."""

    def __init__(self) -> None:
        super().__init__()
        self._named: int | None = None
        self._present = torch.device("cuda", 0)
        self._installed = False

    def pause(self) -> None:
        """Let every name mean what it says."""
        self._named = None

    def follow(self, named: DeviceName, present: DeviceName) -> None:
        """Let one GPU's number mean another from now on, in this thread."""
        if named == present or named.kind != "cuda":
            return
        self._named, self._present = named.index, torch.device("cuda", present.index or 0)
        if not self._installed:
            self._installed = True
            _push_below(self)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._named is None:
            return func(*args, **(kwargs or {}))
        by_number = func in _BY_NUMBER
        given = {name: self._renamed(value, by_number=by_number) for name, value in (kwargs or {}).items()}
        if given.get("device") is None and self._by_default(func):
            given["device"] = self._present
        result = func(*(self._renamed(value, by_number=by_number) for value in args), **given)
        return self._renamed(result, by_number=False) if func is torch.device else result

    def _renamed(self, value: Any, *, by_number: bool) -> Any:
        if isinstance(value, torch.device):
            return self._present if value.type == "cuda" and value.index == self._named else value
        if isinstance(value, str):
            return str(self._present) if value == f"cuda:{self._named}" else value
        if by_number and type(value) is int:
            return self._present if value == self._named else value
        return value

    def _by_default(self, func: Callable[..., Any]) -> bool:
        """Whether the script has made the GPU its default by number, and this makes a tensor there."""
        default = _device.CURRENT_DEVICE
        return (
            default is not None
            and default.type == "cuda"
            and default.index == self._named
            and func in _device._device_constructors()
        )


def _push_below(mode: TorchFunctionMode) -> None:
    """Below all modes that a script may leave; ``torch.set_default_device`` alone expects the bottom."""
    modes = [_pop_mode() for _ in range(_len_torch_function_stack())]  # type: ignore[no-untyped-call]
    if modes and modes[-1] is getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None):
        _push_mode(modes.pop())  # type: ignore[no-untyped-call]
    _push_mode(mode)  # type: ignore[no-untyped-call]
    for above in reversed(modes):
        _push_mode(above)  # type: ignore[no-untyped-call]
