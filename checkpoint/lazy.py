"""Lazy resume: the training goes on while the optimizers' state is still on its way back.

Forward and backward need the weights; moments are needed by the next optimizer step only. So a resume may
bring back everything else first, and the rest behind it, in a `Stream`. Until it is there, a `Placeholder`
stands in ``optimizer.state`` for each tensor that comes later: whoever uses one waits. So do a step, the
optimizer's ``state_dict()``, a fork and the capture of a CUDA graph. A script that keeps such a tensor in a
variable of its own must not read it before the optimizer's next step; that is why it is off unless asked for.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map

from gpuslice.clock import Clock, MonotonicClock

from .discover import live_instances
from .record import SwitchRecord

#: Smaller storages come with the rest: copying them takes less than this does.
LATER_BYTES = 64 << 10
#: Begins with gpuslice's own prefix, which lets the thread pass the gate (``gpuslice.threads``).
_THREAD = "gpuslice-lazy"


class Away(Protocol):
    """State that is about to be brought back (``cargo.Cargo``)."""

    def freed(self, at_least_bytes: int) -> Mapping[int, int]: ...


class LazyResume:
    """Knows the process's optimizers, and decides what may come later.

    Parameters
    ----------
    smallest_bytes
        Storages below this many bytes never come later.
    """

    def __init__(self, *, smallest_bytes: int = LATER_BYTES) -> None:
        self._smallest_bytes = smallest_bytes
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        _wait_where_state_is_read()
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            optimizer.register_state_dict_pre_hook(_before_reading)

    def hold_back(self, away: Away) -> Stream | None:
        """Choose what may come later of what is about to be brought back, and put placeholders for it.

        The stream must be started or cancelled. ``None`` if nothing may.
        """
        if _compiled_code_exists():
            return None
        stream = Stream()
        try:
            with torch._C.DisableTorchFunction():
                self._choose(away, stream)
        except BaseException:
            stream.cancel()
            raise
        return stream if stream.storages else None

    def _choose(self, away: Away, stream: Stream) -> None:
        """Plain tensors in ``optimizer.state`` over storages that no other tensor is over."""
        candidates = away.freed(self._smallest_bytes)
        over = _tensors_over_storages()
        for optimizer in list(self._optimizers):
            for slots in list(optimizer.state.values()):
                for name, tensor in list(slots.items()) if isinstance(slots, dict) else ():
                    if type(tensor) is torch.Tensor and _is_plain(tensor):
                        key = tensor.untyped_storage()._cdata
                        if key in candidates and over[key] == 1:
                            stream.hold(slots, name, tensor, key)

    def close(self) -> None:
        """Look at no more optimizers."""
        self._hook.remove()


class Placeholder:
    """What stands in an optimizer's state for a tensor that comes later; using it waits for the tensor."""

    __slots__ = ("_stream", "_tensor")

    def __init__(self, stream: Stream, tensor: torch.Tensor) -> None:
        self._stream, self._tensor = stream, tensor

    def awaited(self) -> torch.Tensor:
        """The tensor, when it is there."""
        self._stream.wait()
        return self._tensor

    @property
    def __class__(self) -> Any:
        """Whoever asks whether it is a tensor waits, too, and hears that it is one."""
        return type(self.awaited())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.awaited(), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.awaited().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Any:
        return self.awaited().__deepcopy__(memo)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch that was given placeholders with the tensors."""
        args, kwargs = tree_map(_awaited, (args, kwargs or {}))
        return function(*args, **kwargs)


def _awaited(value: object) -> object:
    return value.awaited() if type(value) is Placeholder else value


def _add_operators() -> None:
    """Python looks operators up in the class: there they have to be."""

    def delegating(name: str) -> Callable[..., Any]:
        return lambda one, *arguments: getattr(one.awaited(), name)(*arguments)

    for name in {name for name in dir(torch.Tensor) if name.startswith("__")} - {*dir(Placeholder)}:
        if name != "__torch_dispatch__" and callable(getattr(torch.Tensor, name)):
            setattr(Placeholder, name, delegating(name))


_add_operators()


class Stream:
    """State that comes later.

    Attributes
    ----------
    storages
        ``_cdata`` of what comes later -> its place in the order in which it comes.
    error
        Why it did not come. Then the placeholders stay, and whoever uses one gets ``refusal``.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.storages: dict[int, int] = {}
        self.error: BaseException | None = None
        self.refusal: Exception | None = None
        self._held: list[tuple[dict[Any, Any], Any, torch.Tensor]] = []
        self._going = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._clock = clock or MonotonicClock()
        self._record: SwitchRecord | None = None
        _under_way.append(self)

    def hold(self, slots: dict[Any, Any], name: Any, tensor: torch.Tensor, key: int) -> None:
        """Let a tensor of ``slots`` come later, and put a placeholder there."""
        self._held.append((slots, name, tensor))
        slots[name] = Placeholder(self, tensor)
        self.storages.setdefault(key, len(self.storages))

    def start(
        self,
        copy: Callable[[], object],
        record: SwitchRecord,
        lost: Callable[[BaseException], Exception],
    ) -> None:
        """Bring it, in a thread of its own that begins at `go`, or when somebody waits for it.

        Parameters
        ----------
        copy
            Brings it, and returns when it is there.
        record
            Gets ``stream_s``, and ``awaited_s`` of the main thread.
        lost
            Called if ``copy`` fails; makes the error for whoever asks.
        """
        self._record = record
        self._thread = threading.Thread(target=self._run, args=(copy, record, lost), name=_THREAD)
        try:
            self._thread.start()
        except RuntimeError:  # the system gives no more threads
            self.go()
            self._run(copy, record, lost)

    def go(self) -> None:
        """Begin: the main thread has nothing left to do before the training goes on.

        Any sooner, the two would take turns with the interpreter.
        """
        self._going.set()

    def _run(
        self, copy: Callable[[], object], record: SwitchRecord, lost: Callable[[BaseException], Exception]
    ) -> None:
        self._going.wait()
        began_s = self._clock.now()
        try:
            copy()
        except BaseException as error:  # noqa: BLE001 - shown to whoever asks for the state
            self.error = error
            try:
                self.refusal = lost(error)
            finally:
                self._over.set()
        else:
            record.stream_s = self._clock.now() - began_s
            self.cancel()

    def cancel(self) -> None:
        """Put the tensors back where they belong; also at the end, when all has come."""
        for slots, name, tensor in self._held:
            if type(slots.get(name)) is Placeholder:
                slots[name] = tensor
        self._held.clear()
        if self in _under_way:
            _under_way.remove(self)
        self._over.set()

    def wait(self) -> None:
        """Return when all of it is there; raise ``refusal`` if it never will be."""
        if threading.current_thread() is self._thread:
            return
        if not self._over.is_set():
            self.go()
            began_s = self._clock.now()
            self._over.wait()
            if self._record is not None and threading.current_thread() is threading.main_thread():
                self._record.awaited_s += self._clock.now() - began_s
        if self.error is not None:
            raise self.refusal or self.error


_under_way: list[Stream] = []
_waiting = False
_capture_begin = torch.cuda.CUDAGraph.capture_begin


def under_way() -> bool:
    """Whether something of the process's is still to come, or never will."""
    return bool(_under_way)


def await_all() -> None:
    """Wait for all that is under way in this process."""
    for stream in tuple(_under_way):
        stream.wait()


def _wait_where_state_is_read() -> None:
    """Hook what cannot be unhooked, once; it costs next to nothing while nothing is under way."""
    global _waiting
    if not _waiting:
        _waiting = True
        os.register_at_fork(before=await_all)
        register_optimizer_step_pre_hook(_before_reading)
        torch.cuda.CUDAGraph.capture_begin = _capture  # type: ignore[method-assign, assignment]


def _before_reading(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if _under_way and not torch.compiler.is_compiling():
        await_all()


def _capture(graph: torch.cuda.CUDAGraph, *arguments: Any, **options: Any) -> None:
    """``CUDAGraph.capture_begin``: a capture does not bear copies beside it."""
    await_all()
    _capture_begin(graph, *arguments, **options)


def _tensors_over_storages() -> Counter[int]:
    """How many live tensors are over each storage, by ``_cdata``."""
    over: Counter[int] = Counter()
    for tensor in live_instances(torch.Tensor)[0]:
        with suppress(RuntimeError, NotImplementedError):  # it has no storage
            over[tensor.untyped_storage()._cdata] += 1
    return over


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own, and no graph knows it."""
    return (
        tensor.layout is torch.strided
        and torch._C._has_storage(tensor)
        and not (tensor.requires_grad or tensor._is_view())
    )


def _compiled_code_exists() -> bool:
    """Whether torch.compile has made code, which takes tensors out of a dict without asking anybody."""
    module = sys.modules.get("torch._dynamo.convert_frame")
    if module is None:
        return False
    codes = getattr(module, "input_codes", None)
    return bool(getattr(codes, "seen", True))
