"""A gate that stops a parked job's other threads at their next torch operation.

A suspended tensor has no memory. The main thread is parked, but a script may have other threads (an EMA
updater, a checkpoint writer), which must not notice. Every thread that starts after ``install`` runs under a
``TorchFunctionMode``, so each of its torch operations passes the gate. Under ``gpuslice run``, threads that
started before pass it as well (``take_in``). Any other thread whose code knows torch makes the suspend fail,
by name. A mode cannot see everything (``torch.save`` writing a storage): such work is found in the thread's
stack, and its end is waited for. A thread that stays inside torch for too long makes the suspend fail, by
name, before anything is touched.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from types import FrameType, FunctionType, ModuleType
from typing import Any, Protocol

from torch.overrides import TorchFunctionMode

from gpuslice.checkpoint.discover.thread_stacks import stacks
from gpuslice.checkpoint.gate import OWN_PREFIX
from gpuslice.checkpoint.parked_access import ParkedAccess
from gpuslice.errors import SuspendRefusedError, hide_own_frames

#: How long a thread may take to leave torch before the suspend is refused.
PATIENCE_S = 10.0
#: Leaving a frame (``torch.save``) sends no signal, so stacks are looked at again after this long.
_LOOK_AGAIN_S = 0.005
#: Modules in which torch's own threads wait. Such threads hold nothing of the device.
_IDLE_MODULES = ("torch.utils.data._utils.pin_memory", "torch._inductor.", "torch.multiprocessing")


#: Carries out a torch operation, given function, types and arguments as torch hands them to a mode.
CarryOut = Callable[[Callable[..., Any], Sequence[type], Sequence[Any], Mapping[str, Any]], Any]


class EarlyThreads(Protocol):
    """The threads older than the gate, which enter it by themselves (gpuslice's ``sitecustomize``)."""

    @property
    def idents(self) -> Set[int]:
        """Idents of the threads that have not entered yet. Each enters before it next calls a function."""
        ...

    def admit(self, enter: Callable[[], None]) -> None:
        """Have each of these threads call ``enter``."""
        ...


class ThreadGate:
    """A gate between the process's other threads and torch.

    Parameters
    ----------
    patience_s
        How long ``close`` waits for a thread that is inside torch, in seconds.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        #: Carries out a thread's torch operation, once the thread has passed the gate.
        self.carry_out: CarryOut = _as_asked
        #: Explains errors of torch operations while the gate is open and the job is suspended.
        self.parked_access = ParkedAccess()
        self._begin()

    def _begin(self) -> None:
        self._opened = threading.Event()
        self._opened.set()
        self._is_shut = False
        self._left = threading.Event()
        self._modes: dict[int, _GateMode] = {}
        self._standing: set[int] = set()
        self._early: EarlyThreads | None = None

    def install(self) -> None:
        """Send every ``threading.Thread`` that starts from now on through the gate.

        The wrapper encloses ``Thread._bootstrap_inner``, which reports a thread's exceptions itself: none
        of our frames is in their tracebacks.
        """
        original = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

        def _bootstrap_inner(thread: threading.Thread) -> None:
            if thread.name.startswith(OWN_PREFIX):
                original(thread)
                return
            with self.mode():
                original(thread)

        threading.Thread._bootstrap_inner = _bootstrap_inner  # type: ignore[attr-defined]

    def forked(self) -> ThreadGate:
        """Return the gate for a fork: this one, open and with no thread inside.

        The wrapper that sends threads through this gate still exists in the fork.
        """
        self._begin()
        return self

    def take_in(self, early: EarlyThreads) -> None:
        """Send threads that are older than the gate through it from now on."""
        self._early = early
        early.admit(self._enter_here)

    def _enter_here(self) -> None:
        """Send the calling thread, which runs already, through the gate for the rest of its life."""
        thread, mode = threading.current_thread(), self.mode()
        delete = thread._delete  # type: ignore[attr-defined]

        def leave() -> None:  # what a thread does last
            mode.__exit__(None, None, None)
            delete()

        mode.__enter__()
        thread._delete = leave  # type: ignore[attr-defined]

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Treat the calling thread as stopped inside the block, whatever its stack looks like."""
        ident = threading.get_ident()
        self._standing.add(ident)
        self._left.set()
        try:
            yield
        finally:
            self._standing.discard(ident)

    def mode(self) -> _GateMode:
        """Return a torch mode under which the calling thread's operations pass this gate."""
        return _GateMode(self)

    def close(self) -> None:
        """Stop the other threads at the gate. Return when no other thread is inside torch.

        Raises
        ------
        SuspendRefusedError
            If a thread does not leave torch in time, or does not pass this gate. The gate is open again then.
        """
        self._opened.clear()
        deadline_s = time.monotonic() + self._patience_s
        while busy := self._busy():
            if time.monotonic() > deadline_s:
                self.open()
                raise SuspendRefusedError(
                    f"thread {busy[0]!r} does not leave torch: it runs {busy[1]}",
                    "let that thread finish its work before the suspend, or do the work in the main thread",
                )
            self._left.wait(_LOOK_AGAIN_S)
            self._left.clear()
        if ungated := self._ungated_thread():
            self.open()
            raise SuspendRefusedError(
                f"thread {ungated!r} may use torch at any time, and is older than gpuslice in this process",
                "start it after `import torch`, as a threading.Thread, and the script by `gpuslice run`",
            )

    def open(self) -> None:
        """Let the other threads go on."""
        self._opened.set()

    def shut(self) -> None:
        """Never let the other threads go on: each ends, by ``SystemExit``, at its next torch operation."""
        self._is_shut = True
        self._opened.set()

    @property
    def alone(self) -> bool:
        """True if no other Python thread could look at a tensor's memory without torch."""
        return not any(True for _ in self._others())

    def _others(self) -> Iterator[tuple[str, int, list[FrameType]]]:
        """Yield name, ident and frames of each other Python thread that is not known to be harmless."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        harmless = _compilers() | self._standing | {threading.get_ident()}
        for ident, frames in stacks().items():
            name = names.get(ident, f"#{ident}")
            if ident in harmless or name.startswith(OWN_PREFIX):
                continue
            if not _waits_in_torch(frames):
                yield name, ident, frames

    def _busy(self) -> tuple[str, str] | None:
        """Return the name of a thread that is inside torch, and what it runs there; None if there is none."""
        for name, ident, frames in self._others():
            mode = self._modes.get(ident)
            if mode is not None and mode.waiting:
                continue
            if mode is not None and mode.inside is not None:
                return name, getattr(mode.inside, "__name__", repr(mode.inside))
            if module := _torch_module(frames):
                return name, module
        return None

    def _ungated_thread(self) -> str | None:
        """Return the name of a thread whose code knows torch and that the gate cannot stop; else None."""
        early = self._early.idents if self._early is not None else ()
        for name, ident, frames in self._others():
            if ident not in self._modes and ident not in early and any(map(knows_torch, frames)):
                return name
        return None


class _GateMode(TorchFunctionMode):
    """The mode that sends one thread's torch operations through the gate.

    ``inside`` is the operation that the thread is in. It is written before the gate is read, and ``close``
    shuts the gate before it reads ``inside``: one of the two always sees the other.
    """

    def __init__(self, gate: ThreadGate) -> None:
        self._gate = gate
        self.inside: Callable[..., Any] | None = None
        self.waiting = False

    def __enter__(self) -> _GateMode:
        self._gate._modes[threading.get_ident()] = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._gate._modes.pop(threading.get_ident(), None)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        gate = self._gate
        self.inside = func
        while not gate._opened.is_set():
            self.waiting = True
            self.inside = None
            gate._left.set()
            gate._opened.wait()
            self.inside = func
            self.waiting = False
        if gate._is_shut:
            self.inside = None
            raise SystemExit
        try:
            return gate.parked_access.call(gate.carry_out, func, types, args, kwargs or {})
        except BaseException as error:
            hide_own_frames(error)
            raise
        finally:
            self.inside = None
            if not gate._opened.is_set():
                gate._left.set()


def _as_asked(
    func: Callable[..., Any], types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    return func(*args, **kwargs)


def _compilers() -> set[int | None]:
    """Return the idents of the threads in torch.compile's pool: they compile code, and see no tensors.

    Between two compilations they wait with no frame of torch's on their stack. Only the pool itself
    (``torch._inductor.async_compile.AsyncCompile.pool``, made on first use) tells who they are.
    """
    module = sys.modules.get("torch._inductor.async_compile")
    pool: Any = getattr(getattr(module, "AsyncCompile", None), "pool", None)
    if not hasattr(pool, "cache_info") or not pool.cache_info().currsize:
        return set()
    return {thread.ident for thread in getattr(pool(), "_threads", ())}


def knows_torch(frame: FrameType) -> bool:
    """Return True if the frame's module has imported torch or something from torch."""
    for value in list(frame.f_globals.values()):
        if isinstance(value, ModuleType):
            home = value.__name__
        else:  # where a class or function comes from, or the class of a tensor
            home = (value if isinstance(value, type | FunctionType) else type(value)).__module__
        if isinstance(home, str) and home.split(".")[0] == "torch":
            return True
    return False


def inside_torch(frames: Iterable[FrameType]) -> bool:
    """Return True if a stack, the innermost frame first, is inside torch and does not just wait there."""
    found = _torch_module(frames)
    return found is not None and not found.startswith(_IDLE_MODULES)


def _waits_in_torch(frames: Iterable[FrameType]) -> bool:
    return (_torch_module(frames) or "").startswith(_IDLE_MODULES)


def _torch_module(frames: Iterable[FrameType]) -> str | None:
    """Return the name of the innermost torch module on a stack; None if there is none."""
    for one in frames:
        name = one.f_globals.get("__name__", "")
        if name == "torch" or name.startswith("torch."):
            return str(name)
    return None
