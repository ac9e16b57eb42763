"""Knows where an attached job is in its epochs and batches, and brings a restarted process back there.

At the start of every pass over a loader the states of the random number generators are kept. A restarted
process runs the script's own loops again and leaves out what is over. The pass that was going on begins with
the kept states, so its order is the same, and its batches that are done are skipped. Then the target is
reached, and everything is set to what the snapshot says: what the script did on the way is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from torch.utils.data.dataloader import _BaseDataLoaderIter

from gpuslice.checkpoint.named import process_rng
from gpuslice.checkpoint.named.describe import is_stateful
from gpuslice.checkpoint.named.generators import (
    Generator,
    check_generator_state,
    generator_state,
    own_generators,
    set_generator_state,
)
from gpuslice.errors import RefusedSnapshotError, UsageError, hide_own_frames
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.ending import deliver
from gpuslice.training.indices import Drawn, asks_by_index, skip

Batch = TypeVar("Batch")
#: Called with the reason why a restarted pass differs from the one that was going on.
Differs = Callable[[str], None]

#: The epoch of a position that is in no ``job.epochs`` loop.
OUTSIDE = -1


class Position(NamedTuple):
    """A place in the script's loops; positions compare in the order in which the script meets them.

    Attributes
    ----------
    loop
        Number of ``job.epochs`` loops that are over.
    epoch
        The epoch of the loop that is going on, or ``OUTSIDE``.
    passes
        Number of ``job.batches`` loops of this epoch that are over.
    """

    loop: int = 0
    epoch: int = OUTSIDE
    passes: int = 0


class Pass(NamedTuple):
    """A pass over a loader that is going on.

    Attributes
    ----------
    batches
        Number of batches handed out.
    start
        States of the random number generators when the pass began: the process's and the loader's own.
    loader
        ``state_dict()`` of a loader that can continue by itself, else ``None``.
    drawn
        Checksum of the indices that its sampler has given, where they can be seen.
    length
        Batches of the whole pass, if the loader knew.
    """

    batches: int
    start: dict[str, Any]
    loader: Any = None
    drawn: int | None = None
    length: int | None = None


class LoaderAttributes(Protocol):
    """The part that keeps the attributes of a loader's objects."""

    def enter(self, loader: object) -> None: ...

    def begin_pass(self, loader: object) -> None: ...

    def restart_pass(self, loader: object) -> None: ...

    def end_pass(self) -> None: ...


class Goal(NamedTuple):
    """Where a restarted process goes on: position, the pass that was going on, optimizer steps made."""

    position: Position
    current: Pass | None
    steps: int


class Progress:
    """The position of one job in its loops.

    Parameters
    ----------
    boundaries
        The process's counter.
    knows
        Returns True if a generator is saved with the job's named objects. Those of loaders must be.
    finish
        Called when a loop over epochs has ended by itself: the training is then taken to be over.
    attributes
        Keeps the attributes of a loader's objects.
    """

    def __init__(
        self,
        boundaries: BoundaryCounter,
        knows: Callable[[Generator], bool],
        attributes: LoaderAttributes,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._boundaries = boundaries
        self._attributes = attributes
        self._drawn: Drawn | None = None
        self._knows = knows
        self._finish = finish or _nothing
        #: True if the last loop over epochs has ended by itself, and no other loop has begun.
        self._finished = False
        self._position = Position()
        self._target: Position | None = None
        self._resumed: Pass | None = None
        self._reached: Callable[[], None] = _nothing
        self._differs: Differs = _ignore
        self._gpus: Mapping[int, int] = {}
        self._pass: Pass | None = None
        self._loader: Iterable[Any] = ()
        self._fetching = False
        self._depth = 0
        self._ended = ""

    def end(self, cause: str) -> None:
        """Have the loops raise an error that names the cause when they go on."""
        self._ended = cause

    def _check_attached(self) -> None:
        if self._ended:
            raise UsageError(
                f"a loop continues after its job was detached: {self._ended}",
                "leave the loop before that, and go through the loops of the job that was attached last",
            )

    def state(self) -> dict[str, Any]:
        """Return where a restart goes on, as plain values: after a pass of an epoch, with the next epoch."""
        position, current = self._position, self._pass
        if current is None and position.epoch != OUTSIDE and position.passes:
            position = Position(position.loop, position.epoch + 1)
        if current is not None and is_stateful(self._loader):
            current = current._replace(loader=self._loader.state_dict())  # type: ignore[attr-defined]
        if current is not None and self._drawn is not None:
            current = current._replace(drawn=self._drawn.checksum)
        return {
            "position": tuple(position),
            "pass": None if current is None else tuple(current),
            "steps": self._boundaries.steps,
        }

    def head_for(
        self, goal: Goal, reached: Callable[[], None], gpus: Mapping[int, int], differs: Differs | None = None
    ) -> None:
        """Have the loops skip to ``goal``, where a snapshot was taken, and call ``reached`` there.

        ``gpus`` maps the old process's GPUs to those of this one. ``differs`` is called with the reason if
        the loader's sampler gives another order than before.
        """
        self._differs = differs or _ignore
        self._target, self._resumed = goal.position, goal.current
        self._reached, self._gpus = reached, gpus
        self._go_to(self._position)

    def count_from(self, goal: Goal) -> None:
        """Set the number of optimizer steps to what it was when the snapshot was taken."""
        self._boundaries.steps = goal.steps

    def restartable(self, *, explicit: bool) -> bool:
        """Return True if another process could go on from a snapshot taken here and now.

        False after a pass's last batch: a restart would leave out the loop, and the variables that its body
        sets. False after the training: no process may begin with a finished model. False while two threads
        train: one would begin amid the batch of the other.
        """
        if self._boundaries.thread.shared or self._finished or self._target is not None or self._depth > 1:
            return False
        if explicit:
            return True
        return self._fetching and self._pass is not None and self._pass.batches != _length(self._loader)

    @property
    def restartable_later(self) -> bool:
        """True if the script goes through the job's loops, so that it can likely be restarted later."""
        if self._finished:
            return False
        return self._target is not None or self._position != Position() or self._depth > 0

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs of one loop that are not over. When it ends by itself, the training is over."""
        # A loop that was left by ``break`` has not moved on by itself.
        loop = self._position.loop + (self._position.epoch != OUTSIDE)
        for epoch in range(self._first_epoch(loop, count), count):
            self._check_attached()
            self._finished = False
            self._go_to(Position(loop, epoch))
            yield epoch
        self._check_attached()
        self._go_to(Position(loop + 1))
        if self._target is None and count > 0:
            self._finished = True
            self._finish()

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of one pass that are not done."""
        self._check_attached()
        self._depth += 1
        try:
            if self._depth > 1:
                yield from loader
                return
            self._attributes.enter(loader)
            if self._target is None or self._position == self._target:
                yield from self._run(loader)
        except BaseException as error:
            hide_own_frames(error, keep_bugs=True)
            raise
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._pass = self._drawn = None
                self._attributes.end_pass()
                self._position = self._position._replace(passes=self._position.passes + 1)

    def _first_epoch(self, loop: int, count: int) -> int:
        if self._target is None or loop > self._target.loop:
            return 0
        return count if loop < self._target.loop else max(self._target.epoch, 0)

    def _go_to(self, position: Position) -> None:
        """Set the position, between two passes. Arrive if the target's snapshot was taken there, too."""
        self._position = position
        if self._target is None or position < self._target:
            return
        if self._resumed is None:
            self._arrive()
        elif position > self._target:
            raise RefusedSnapshotError(
                f"the script is past {self._target} without the pass over a loader that was going on there",
                "restart the script that wrote the snapshot, or use another job name",
            )

    def _arrive(self) -> None:
        reached, self._reached = self._reached, _nothing
        self._target = self._resumed = None
        reached()

    def _run(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        resumed = self._resumed
        if self._target is not None and resumed is None:
            self._arrive()
        iterator, current = self._begin(loader, resumed)
        # The boundary before the first batch after a restart is the one that the snapshot was taken at.
        quiet: AbstractContextManager[None] = (
            nullcontext() if resumed is None else self._boundaries.skipping()
        )
        crossing = not (self._boundaries.hooked and isinstance(iterator, _BaseDataLoaderIter))
        while True:
            self._check_attached()
            self._fetching = True
            try:
                with quiet:
                    if crossing:
                        deliver(self._boundaries.fetching())
                    batch = next(iterator)
            except StopIteration:
                return
            finally:
                self._fetching = False
            quiet = nullcontext()
            self._pass = current = current._replace(batches=current.batches + 1)
            yield batch

    def _begin(self, loader: Iterable[Batch], resumed: Pass | None) -> tuple[Iterator[Batch], Pass]:
        if resumed is not None:
            self._attributes.restart_pass(loader)
        self._attributes.begin_pass(loader)
        generators = own_generators(loader)
        if not all(map(self._knows, generators)):
            raise UsageError(
                "job.batches got a loader with a random number generator of its own, which is not attached",
                "attach the loader: gpuslice.attach(..., loader=loader)",
            )
        if getattr(loader, "persistent_workers", False):
            # What workers carry over from one pass to the next cannot be saved: they start anew for each.
            loader._iterator = None  # type: ignore[attr-defined]
        if resumed is None:
            start = {
                "process": process_rng.capture(),
                "own": [generator_state(item)[1] for item in generators],
            }
            self._pass, self._loader = Pass(0, start, length=_length(loader)), loader
            return self._watched(iter(loader)), self._pass
        self._pass, self._loader = resumed, loader
        pairs = _paired(generators, resumed.start.get("own"))
        process_rng.restore(resumed.start["process"], self._gpus)
        for generator, state in pairs:
            set_generator_state(generator, state)
        _check_length(loader, resumed)
        if is_stateful(loader):
            loader.load_state_dict(resumed.loader)  # type: ignore[attr-defined]
        iterator = self._watched(iter(loader))
        if not is_stateful(loader):
            with self._boundaries.skipping():
                skip(iterator, resumed.batches)
        if self._drawn is not None and resumed.drawn not in (None, self._drawn.checksum):
            why = "the sampler of the loader gives another order than before the restart"
            self._differs(why)
            raise RefusedSnapshotError(
                why, "have it choose by its attributes and generators at the start of a pass, or begin anew"
            )
        self._arrive()
        return iterator, resumed

    def _watched(self, iterator: Iterator[Batch]) -> Iterator[Batch]:
        """Return ``iterator``, and follow its sampler's indices if this process fetches by index."""
        self._drawn = None
        if asks_by_index(iterator):
            self._drawn = iterator._sampler_iter = Drawn(iterator._sampler_iter)
        return iterator


def goal(state: Any, gpus: Mapping[int, int]) -> Goal:
    """Check and return what `Progress.state` gave. The file that it comes from may be forged.

    Parameters
    ----------
    gpus
        The old process's GPUs, with those of this process that take their place.

    Raises
    ------
    RefusedSnapshotError
        If ``state`` is nothing of the kind, or has random states that cannot be restored.
    """
    try:
        position = msgspec.convert(state["position"], Position)
        current = msgspec.convert(state["pass"], Pass | None)
        steps = msgspec.convert(state.get("steps", 0), int)  # what an older version wrote does not say
    except (AttributeError, LookupError, TypeError, msgspec.ValidationError) as error:
        raise RefusedSnapshotError("the snapshot says nothing of epochs and batches") from error
    if current is not None:
        process_rng.check(current.start.get("process"), gpus)
    return Goal(position, current, steps)


def _paired(generators: list[Generator], states: Any) -> list[tuple[Generator, Any]]:
    """Return each of a loader's generators with its saved state. Raise an error if they do not match."""
    if not isinstance(states, list) or len(states) != len(generators):
        raise RefusedSnapshotError(
            f"the loader has {len(generators)} random number generators, but others were saved",
            "restart the script that wrote the snapshot, or use another job name",
        )
    pairs = list(zip(generators, states, strict=True))
    for generator, state in pairs:
        check_generator_state(generator, state, "a generator of the loader")
    return pairs


def _length(loader: object) -> int | None:
    """Return the number of batches of a pass; None if the loader does not know."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


def _check_length(loader: object, resumed: Pass) -> None:
    now = _length(loader)
    if None not in (now, resumed.length) and now != resumed.length:
        raise RefusedSnapshotError(
            f"the loader has {now} batches, but had {resumed.length} when the snapshot was taken",
            "restart with the same data and batch size",
        )


def _ignore(_why: str) -> None:
    """Do nothing: the callback where the script cannot begin anew."""


def _nothing() -> None:
    """Do nothing. Stands in for a callback that is not given."""
