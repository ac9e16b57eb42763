"""Lazy resume: the training goes on while the optimizers' state is still on its way back.

Forward and backward need the weights; optimizer state is needed by the next optimizer step only. So a resume
may bring back everything else first, and the rest behind it, in a `Stream`. Until it is there, `AwaitedSlots`
stand in ``optimizer.state``: whoever looks into one waits. So do a step, the optimizer's ``state_dict()``, a
fork and the capture of a CUDA graph. A script that keeps such a tensor, or a parameter's dict, in a variable
of its own must not read it before the optimizer's next step; that is why it is off unless asked for.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gpuslice.checkpoint.discover.live_instances import live_instances
from gpuslice.checkpoint.gate import OWN_PREFIX
from gpuslice.clock import MonotonicClock

#: Smaller storages come with the rest: copying them takes less than this does.
LATER_BYTES = 64 << 10


class StreamTimes(Protocol):
    """Gets how long the state was on its way, and how long the training waited for it (``SwitchRecord``)."""

    stream_s: float
    awaited_s: float


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

    def hold_back(self, freed: Callable[[int], Collection[int]]) -> Stream | None:
        """Choose what may come later of what is about to be brought back, and bar the way to it.

        ``freed`` knows the storages of at least so many bytes that have no memory now. The stream must be
        started or cancelled. ``None`` if nothing may.
        """
        if _compiled_code_exists():
            return None
        with torch._C.DisableTorchFunction():
            chosen = list(self._chosen(freed(self._smallest_bytes)))
        return Stream(chosen) if chosen else None

    def _chosen(self, candidates: Collection[int]) -> Iterator[tuple[dict[Any, Any], Any, list[int]]]:
        """Plain tensors in ``optimizer.state`` over storages that no other tensor is over.

        For each parameter that has some: the state, the parameter, and the storages.
        """
        over = _tensors_over_storages()
        for optimizer in list(self._optimizers):
            for parameter, slots in list(optimizer.state.items()):
                if type(slots) is dict:
                    keys = [tensor.untyped_storage()._cdata for tensor in slots.values() if _is_plain(tensor)]
                    later = [key for key in keys if key in candidates and over[key] == 1]
                    if later:
                        yield optimizer.state, parameter, later

    def close(self) -> None:
        """Look at no more optimizers."""
        self._hook.remove()


class AwaitedSlots(dict[Any, Any]):
    """What stands in ``optimizer.state`` for a parameter's dict; whatever is done with it waits first."""

    def __init__(self, stream: Stream, slots: dict[Any, Any]) -> None:
        super().__init__()
        self._stream = stream
        self.slots = slots

    def _do(self, name: str, *arguments: Any, **options: Any) -> Any:
        self._stream.wait()
        return getattr(self.slots, name)(*arguments, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is a plain dict."""
        self._stream.wait()
        return dict, (dict(self.slots),)


def _delegating(name: str) -> Callable[..., Any]:
    return lambda slots, *arguments, **options: slots._do(name, *arguments, **options)


#: What an object needs before it can be asked anything, and what says nothing of what is in it.
_OWN = {
    *("__class__", "__getattribute__", "__init__", "__new__", "__setattr__", "__init_subclass__"),
    *("__reduce_ex__", "__class_getitem__", "__subclasshook__", "__doc__", "__hash__", "fromkeys"),
}
for _name in set(dir(dict)) - _OWN:
    setattr(AwaitedSlots, _name, _delegating(_name))


class Stream:
    """State that comes later; of each parameter ``chosen`` there is a stand-in until then.

    Attributes
    ----------
    storages
        ``_cdata`` of what comes later -> its place in the order in which it comes.
    error
        Why it did not come. Then the way stays barred, and whoever looks gets ``refusal``.
    """

    def __init__(self, chosen: Sequence[tuple[dict[Any, Any], Any, Sequence[int]]]) -> None:
        self.storages: dict[int, int] = {}
        self.error: BaseException | None = None
        self.refusal: Exception | None = None
        self._held = [(state, parameter, state[parameter]) for state, parameter, _ in chosen]
        self._going = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._clock = MonotonicClock()
        self._record: StreamTimes | None = None
        _under_way.append(self)
        for state, parameter, keys in chosen:
            state[parameter] = AwaitedSlots(self, state[parameter])
            self.storages |= {key: len(self.storages) + number for number, key in enumerate(keys)}

    def start(
        self,
        copy: Callable[[], object],
        record: StreamTimes,
        lost: Callable[[BaseException], Exception],
    ) -> None:
        """Bring it by ``copy``, in a thread of its own that begins at `go`, or when somebody waits for it.

        If that fails, ``lost`` makes the error for whoever asks.
        """
        self._record = record
        self._thread = threading.Thread(target=self._run, args=(copy, lost), name=f"{OWN_PREFIX}lazy")
        try:
            self._thread.start()
        except RuntimeError:  # the system gives no more threads
            self.go()
            self._run(copy, lost)

    def go(self) -> None:
        """Begin: the main thread has nothing left to do before the training goes on.

        Any sooner, the two would take turns with the interpreter.
        """
        self._going.set()

    def _run(self, copy: Callable[[], object], lost: Callable[[BaseException], Exception]) -> None:
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
            assert self._record is not None
            self._record.stream_s = self._clock.now() - began_s
            self.cancel()

    def cancel(self) -> None:
        """Put the parameters' dicts back; also at the end, when all has come."""
        for state, parameter, slots in self._held:
            if type(state.get(parameter)) is AwaitedSlots:
                state[parameter] = slots
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


def _is_plain(tensor: Any) -> bool:
    """Whether something is a tensor with memory of its own, which no graph knows."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
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
