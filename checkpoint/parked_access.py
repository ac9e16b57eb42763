"""Raise ``TensorParkedError`` when a script touches a tensor of its suspended job.

The storages themselves refuse access (``kernels.storage_access``), in every thread and however deep in torch,
with torch's ``RuntimeError``. While a job is suspended, this module translates that error on its way out of
torch: by a ``TorchFunctionMode`` in the main thread, by the gate's mode in other threads, and by wrappers
around the few entrances of torch that no mode sees. At other times it costs nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import _C
from torch.overrides import TorchFunctionMode

from gpuslice.errors import TensorParkedError
from gpuslice.kernels.storage_access import REFUSAL

#: torch's messages for a storage without memory, or with less than a tensor over it needs.
_SIGNS = (REFUSAL, "storage of size 0")
#: Functions, by module and name, that reach torch past every mode, or run in threads older than the gate.
_ENTRANCES = (
    ("concurrent.futures.thread", "_WorkItem.run"),
    ("torch._inductor.output_code", "CompiledFxGraph.__call__"),
    ("torch.autograd", "_engine_run_backward"),
    ("torch.serialization", "_legacy_save"),
    ("torch.serialization", "_save"),
)
#: The function that reads memory by its addresses.
_REPLAY = ("torch.cuda.graphs", "CUDAGraph.replay")


class ParkedAccess:
    """Translates torch's errors about missing memory while a job is suspended."""

    def __init__(self) -> None:
        self._mode: _TranslatingMode | None = None
        self._restore: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Begin to translate. Call it in the thread that suspends the job."""
        if self._mode is not None:
            return
        self._mode = _TranslatingMode(self)
        _push(self._mode)
        for module, path in _ENTRANCES:
            self._wrap(module, path, self._translated)
        self._wrap(*_REPLAY, lambda _: _refuse)

    def end(self) -> None:
        """Stop translating, and leave torch as it was. Call it in the same thread as `begin`."""
        mode, self._mode = self._mode, None
        if mode is not None:
            _take_out(mode)
        while self._restore:
            self._restore.pop()()

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call ``function``. If it touches a tensor of a suspended job, raise ``TensorParkedError``."""
        try:
            return function(*arguments, **options)
        except (RuntimeError, IndexError) as error:
            if self._mode is None or isinstance(error, TensorParkedError) or not _is_refusal(error):
                raise
            raise parked_error() from None

    def _translated(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def translated(*arguments: Any, **options: Any) -> Any:
            with _TranslatingMode(self):
                return self.call(original, *arguments, **options)

        return translated

    def _wrap(self, module: str, path: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a function or method of a module, if both are there, until `end`."""
        *holders, name = path.split(".")
        owner: Any = sys.modules.get(module)
        for holder in holders:
            owner = getattr(owner, holder, None)
        original = vars(owner).get(name) if owner is not None else None
        if callable(original):
            setattr(owner, name, wrap(original))
            self._restore.append(functools.partial(setattr, owner, name, original))


class _TranslatingMode(TorchFunctionMode):
    """Routes every function of torch that a thread calls through a `ParkedAccess`."""

    def __init__(self, access: ParkedAccess) -> None:
        self._access = access

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._access.call(func, *args, **(kwargs or {}))


def parked_error() -> TensorParkedError:
    """Return the error that says that the job is suspended and what to do."""
    return TensorParkedError(
        "a tensor of the suspended job was touched, and its memory is away",
        "call job.resume() first, or copy what is needed meanwhile before job.suspend()",
    )


def _is_refusal(error: Exception) -> bool:
    text = str(error)
    return any(sign in text for sign in _SIGNS)


def _refuse(*_: object) -> None:
    raise parked_error()


def _push(mode: TorchFunctionMode) -> None:
    """Put a mode below all other modes of this thread.

    Other modes may be left before this one, and each of them pops the topmost mode. Only the mode of
    ``torch.set_default_device``, which has to be the lowest, stays below.
    """
    above, default = _pop_all(), getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    if above and above[-1] is default:
        _C._push_on_torch_function_stack(above.pop())
    _C._push_on_torch_function_stack(mode)
    _push_again(above)


def _take_out(mode: TorchFunctionMode) -> None:
    _push_again([one for one in _pop_all() if one is not mode])


def _pop_all() -> list[Any]:
    """Remove all modes of this thread, and return them, topmost first."""
    return [_C._pop_torch_function_stack() for _ in range(_C._len_torch_function_stack())]


def _push_again(modes: Sequence[Any]) -> None:
    for mode in reversed(modes):
        _C._push_on_torch_function_stack(mode)
