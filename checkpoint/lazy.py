"""Lazy resume: the training goes on while the optimizers' state is still on its way back.

Forward and backward need the weights; moments are needed by the next optimizer step only. So a resume may
bring back everything else first, and the rest behind it, in a `Stream`. A tensor may come later only if it
cannot be reached but through ``optimizer.state``: the dict, the parameter's own dict, the tensor and its
storage are each referred to once, by Python's count and by torch's. Then whoever wants it has to ask for
that attribute, or for the optimizer's ``__dict__``, and waits there until all of it has arrived: a step, a
``state_dict()``, a pickle, a print. The other ways to come upon an object (the garbage collector, a fork, the
compiler, a graph capture) wait, too. Where any of this cannot be said for sure, nothing comes later.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gpuslice.clock import Clock, MonotonicClock

from . import heap
from .record import SwitchRecord

#: Smaller storages come with the rest: watching them takes longer than copying them.
LATER_BYTES = 64 << 10
#: Begins with gpuslice's own prefix, which lets the thread pass the gate (``gpuslice.threads``).
_THREAD = "gpuslice-lazy"
#: What ``sys.addaudithook`` is told before an object can be come upon by other ways than by asking another
#: object for it; the last one is raised when code is made, as ``torch.compile`` does before it runs any.
_EVENTS = frozenset({"gc.get_objects", "gc.get_referrers", "gc.get_referents", "code.__new__"})


class Away(Protocol):
    """State that is about to be brought back (``cargo.Cargo``); of ours, nobody else has its storages."""

    @property
    def storages(self) -> Sequence[torch.UntypedStorage]: ...
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
        _watch_once()
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._optimizers.add(optimizer)

    def hold_back(self, away: Away) -> Stream | None:
        """Choose what may come later of what is about to be brought back, and bar the way to it.

        The stream must be started or cancelled. ``None`` if nothing may.
        """
        if not _COUNTS_ARE_EXACT or _compiled_code_exists() or not _bar_is_free():
            return None
        stream = Stream()
        stream.bar()  # first: from here on nobody gets at the state who has no reference to it yet
        try:
            with torch._C.DisableTorchFunction():
                stream.storages = self._later(away)
        except BaseException:
            stream.cancel()
            raise
        if not stream.storages:
            stream.cancel()
            return None
        return stream

    def _later(self, away: Away) -> dict[int, int]:
        candidates = away.freed(self._smallest_bytes)
        known = heap.own_references()
        order: dict[int, int] = {}
        for optimizer in list(self._optimizers):
            for address in _lonely(optimizer, away.storages, candidates, known):
                order.setdefault(address, len(order))
        return order

    def close(self) -> None:
        """Look at no more optimizers."""
        self._hook.remove()


class Stream:
    """State that comes later, and the bar before it.

    Attributes
    ----------
    storages
        ``_cdata`` of what comes later -> its place in the order in which it comes.
    error
        Why it did not come. Then the way to it stays barred, and whoever asks gets ``refusal``.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.storages: dict[int, int] = {}
        self.error: BaseException | None = None
        self.refusal: Exception | None = None
        self._going = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._clock = clock or MonotonicClock()
        self._record: SwitchRecord | None = None

    def bar(self) -> None:
        """From now on whoever asks for an optimizer's state waits."""
        with _lock:
            _under_way.append(self)
            torch.optim.Optimizer.__getattribute__ = _asked  # type: ignore[method-assign, assignment]
            torch.cuda.CUDAGraph.capture_begin = _capture  # type: ignore[method-assign, assignment]

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
        """Lift the bar; also at the end, when all has come."""
        with _lock:
            _under_way.remove(self)
            if not _under_way:
                del torch.optim.Optimizer.__getattribute__
                torch.cuda.CUDAGraph.capture_begin = _capture_begin  # type: ignore[method-assign]
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


_lock = threading.Lock()
_under_way: list[Stream] = []
_watching = False
_capture_begin = torch.cuda.CUDAGraph.capture_begin


def under_way() -> bool:
    """Whether something of the process's is still to come, or never will."""
    return bool(_under_way)


def await_all() -> None:
    """Wait for all that is under way in this process."""
    for stream in tuple(_under_way):
        stream.wait()


def _asked(optimizer: torch.optim.Optimizer, name: str) -> Any:
    """``Optimizer.__getattribute__`` while something is under way."""
    if name in ("state", "__dict__"):
        await_all()
    return object.__getattribute__(optimizer, name)


def _capture(graph: torch.cuda.CUDAGraph, *arguments: Any, **options: Any) -> None:
    """``CUDAGraph.capture_begin`` meanwhile: a capture does not bear copies beside it."""
    await_all()
    _capture_begin(graph, *arguments, **options)


def _watch_once() -> None:
    """Hook what cannot be unhooked; it costs next to nothing while nothing is under way."""
    global _watching
    if not _watching:
        _watching = True
        sys.addaudithook(_audit)
        os.register_at_fork(before=await_all)
        register_optimizer_step_pre_hook(_before_step)


def _bar_is_free() -> bool:
    """Whether nobody else has replaced what the bar replaces."""
    return vars(torch.optim.Optimizer).get("__getattribute__", _asked) is _asked


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _under_way and event in _EVENTS:
        await_all()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _under_way and not torch.compiler.is_compiling():
        await_all()


def _compiled_code_exists() -> bool:
    """Whether torch.compile has made code, which takes tensors out of a dict without asking anybody."""
    module = sys.modules.get("torch._dynamo.convert_frame")
    if module is None:
        return False
    codes = getattr(module, "input_codes", None)
    return bool(getattr(codes, "seen", True))


class _Sample:
    """An object to which one dict refers."""

    def __init__(self) -> None:
        self.itself = 0


def _count(holder: Any, key: Any) -> int:
    return sys.getrefcount(holder[key])


_COUNTS_ARE_EXACT = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()


def _counts_of_a_tensor() -> tuple[int, int]:
    """What ``_count`` gives for a tensor that one dict has, and for the Python object of its storage.

    Some versions of torch count themselves, too.
    """
    tensor = {"": torch.empty(1, device="cpu")}
    storage = {"": tensor[""].untyped_storage()}
    return _count(tensor, ""), _count(storage, "")


#: What ``_count`` gives for any other object to which only ``holder`` refers.
_ONCE = _count({"": _Sample()}, "")
_TENSOR_ONCE, _STORAGE_ONCE = _counts_of_a_tensor()
_SAMPLE = _Sample()
#: What ``sys.getrefcount`` gives for the ``__dict__`` of an object that nobody else has asked for it.
_OWN_DICT = sys.getrefcount(object.__getattribute__(_SAMPLE, "__dict__"))


def _lonely(
    optimizer: torch.optim.Optimizer,
    storages: Sequence[torch.UntypedStorage],
    candidates: Mapping[int, int],
    known: Mapping[int, int],
) -> list[int]:
    """``_cdata`` of the candidates that can be reached only through the state of ``optimizer``.

    From the outside in: who has no reference to the outer object by then cannot get one to the inner.
    """
    own = _state_of(optimizer)
    if own is None:
        return []
    found = []
    everyone = list(own.values())
    for index in range(len(everyone)):
        # Besides the state, our list refers to it.
        if type(everyone[index]) is not dict or _count(everyone, index) != _ONCE + 1:
            continue
        slots = everyone[index]
        for name in list(slots):
            if type(slots[name]) is not torch.Tensor or not torch._C._has_storage(slots[name]):
                continue
            if slots[name].untyped_storage()._cdata not in candidates or not _alone(slots, name, known):
                continue
            address = _its_only_storage(slots[name])
            if address is not None and _only_ours(storages, candidates[address], known):
                found.append(address)
    return found


def _state_of(optimizer: torch.optim.Optimizer) -> dict[Any, Any] | None:
    """The optimizer's state, if our bar is the only way to it."""
    kind = type(optimizer)
    if kind.__getattribute__ is not _asked or any("state" in vars(base) for base in kind.__mro__):
        return None
    if sys.getrefcount(object.__getattribute__(optimizer, "__dict__")) != _OWN_DICT:
        return None
    attributes = object.__getattribute__(optimizer, "__dict__")
    if "state" not in attributes or _count(attributes, "state") != _ONCE:
        return None
    state = attributes["state"]
    return state if type(state) in (dict, defaultdict) else None


def _alone(holder: Mapping[Any, Any], key: Any, known: Mapping[int, int]) -> bool:
    """Whether only ``holder`` refers to its tensor, and nobody weakly but the sweep."""
    return _not_watched(holder[key], known) and _count(holder, key) == _TENSOR_ONCE


def _not_watched(item: object, known: Mapping[int, int]) -> bool:
    references = weakref.getweakrefs(item)
    if not references:
        return True
    # References without a callback are shared: the sweep's own may be somebody else's, too.
    ours = known.get(heap.identity(references[0]), 0)
    return len(references) == 1 and ours > 0 and sys.getrefcount(references[0]) == _ONCE + ours


def _its_only_storage(tensor: torch.Tensor) -> int | None:
    """``_cdata`` of the memory of a tensor that nothing of torch's refers to either, or to that memory."""
    if tensor.layout is not torch.strided or tensor.requires_grad or tensor.grad_fn is not None:
        return None
    if tensor._is_view() or tensor.grad is not None:
        return None
    address: int = tensor.untyped_storage()._cdata
    # The tensor and the Python object of the storage count once each.
    uses = torch._C._storage_Use_Count(address)
    return address if uses == 2 and tensor._use_count() == 1 else None  # type: ignore[attr-defined]


def _only_ours(storages: Sequence[torch.UntypedStorage], position: int, known: Mapping[int, int]) -> bool:
    """Whether the storage's Python object is in nobody's hands but ours."""
    return _not_watched(storages[position], known) and _count(storages, position) == _STORAGE_ONCE
