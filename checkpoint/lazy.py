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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gpuslice.clock import Clock, MonotonicClock

from . import heap
from .lonely import COUNTS_ARE_EXACT, lonely, state_of
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
        self._foresight: _Foresight | None = None
        _watch_once()
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._optimizers.add(optimizer)

    def foresee(self, away: Away) -> None:
        """Find out now what may come later, so that `hold_back` need not: it takes milliseconds.

        That holds until somebody gets at an optimizer's state, which is noticed.
        """
        self.forget()
        if not _is_possible():
            return
        foresight = self._foresight = _Foresight(away)
        try:
            _raise_bar(foresight, _foresights)  # first: from here on whoever gets at the state is noticed
            foresight.storages = self._later(away)
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Whatever was foreseen."""
        if self._foresight is not None:
            _lower_bar(self._foresight, _foresights)
            self._foresight = None

    def hold_back(self, away: Away) -> Stream | None:
        """Choose what may come later of what is about to be brought back, and bar the way to it.

        The stream must be started or cancelled. ``None`` if nothing may.
        """
        if not _is_possible():
            return None
        stream = Stream()
        stream.bar()  # first: from here on nobody gets at the state who has no reference to it yet
        try:
            foreseen = self._foreseen(away)
            stream.storages = self._later(away) if foreseen is None else foreseen
        except BaseException:
            stream.cancel()
            raise
        if not stream.storages:
            stream.cancel()
            return None
        return stream

    def _foreseen(self, away: Away) -> dict[int, int] | None:
        """What was foreseen for this, if it still holds."""
        foresight = self._foresight
        if foresight is None or foresight.away is not away or not foresight.holds:
            return None
        if any(state_of(optimizer, _asked) is None for optimizer in list(self._optimizers)):
            return None
        return foresight.storages

    def _later(self, away: Away) -> dict[int, int]:
        with torch._C.DisableTorchFunction():
            candidates = away.freed(self._smallest_bytes)
            known = heap.own_references()
            order: dict[int, int] = {}
            for optimizer in list(self._optimizers):
                state = state_of(optimizer, _asked)
                for address in lonely(state, away.storages, candidates, known) if state else ():
                    order.setdefault(address, len(order))
            return order

    def close(self) -> None:
        """Look at no more optimizers."""
        self.forget()
        self._hook.remove()


@dataclass(slots=True, eq=False)
class _Foresight:
    """What may come later of what is away, as long as nobody has come near it since."""

    away: Away
    storages: dict[int, int] = field(default_factory=dict)
    holds: bool = True


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
        _raise_bar(self, _under_way)

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
        _lower_bar(self, _under_way)
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
_foresights: list[_Foresight] = []
_watching = False
_capture_begin = torch.cuda.CUDAGraph.capture_begin
_Behind = TypeVar("_Behind", Stream, _Foresight)


def _raise_bar(one: _Behind, those: list[_Behind]) -> None:
    """Have whoever asks for an optimizer's state come by `_approached`, for the sake of ``one``."""
    with _lock:
        those.append(one)
        torch.optim.Optimizer.__getattribute__ = _asked  # type: ignore[method-assign, assignment]
        torch.cuda.CUDAGraph.capture_begin = _capture  # type: ignore[method-assign, assignment]


def _lower_bar(one: _Behind, those: list[_Behind]) -> None:
    """``one`` needs it no more; the last one takes it away."""
    with _lock:
        if one in those:
            those.remove(one)
        if not (_under_way or _foresights):
            if vars(torch.optim.Optimizer).get("__getattribute__") is _asked:
                del torch.optim.Optimizer.__getattribute__
            torch.cuda.CUDAGraph.capture_begin = _capture_begin  # type: ignore[method-assign]


def under_way() -> bool:
    """Whether something of the process's is still to come, or never will."""
    return bool(_under_way)


def await_all() -> None:
    """Wait for all that is under way in this process."""
    for stream in tuple(_under_way):
        stream.wait()


def _approached() -> None:
    """Somebody may come by an optimizer's state: wait until it is there, and foresee nothing of it."""
    for foresight in tuple(_foresights):
        foresight.holds = False
    await_all()


def _asked(optimizer: torch.optim.Optimizer, name: str) -> Any:
    """``Optimizer.__getattribute__`` meanwhile."""
    found = object.__getattribute__(optimizer, name)
    if name in ("state", "__dict__"):
        _approached()  # now: whoever counts references before this has us come by, and afterwards counts ours
    return found


def _capture(graph: torch.cuda.CUDAGraph, *arguments: Any, **options: Any) -> None:
    """``CUDAGraph.capture_begin`` meanwhile: a capture does not bear copies beside it."""
    _approached()
    _capture_begin(graph, *arguments, **options)


def _watch_once() -> None:
    """Hook what cannot be unhooked; it costs next to nothing while nothing is under way."""
    global _watching
    if not _watching:
        _watching = True
        sys.addaudithook(_audit)
        os.register_at_fork(before=_approached)
        register_optimizer_step_pre_hook(_before_step)


def _is_possible() -> bool:
    """Whether anything may come later in this process as it is."""
    return COUNTS_ARE_EXACT and not _compiled_code_exists() and _bar_is_free()


def _bar_is_free() -> bool:
    """Whether nobody else has replaced what the bar replaces."""
    return vars(torch.optim.Optimizer).get("__getattribute__", _asked) is _asked


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if (_under_way or _foresights) and event in _EVENTS:
        _approached()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if (_under_way or _foresights) and not torch.compiler.is_compiling():
        _approached()


def _compiled_code_exists() -> bool:
    """Whether torch.compile has made code, which takes tensors out of a dict without asking anybody."""
    module = sys.modules.get("torch._dynamo.convert_frame")
    if module is None:
        return False
    codes = getattr(module, "input_codes", None)
    return bool(getattr(codes, "seen", True))
