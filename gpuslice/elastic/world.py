"""A training whose ranks come and go between two global batches."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.utils.data import Dataset

from gpuslice.checkpoint.attributes.job_attributes import JobAttributes
from gpuslice.checkpoint.named.describe import named_tensors
from gpuslice.errors import UsageError
from gpuslice.runtime import trainings
from gpuslice.runtime.boundaries import boundary
from gpuslice.runtime.ending import at_end, ended_well
from gpuslice.runtime.process import Membership
from gpuslice.runtime.runtime import Runtime
from gpuslice.training import identity
from gpuslice.training.state import State

from . import group, state
from .batches import Batch, Feed, scale_rates
from .sampler import ElasticSampler

if TYPE_CHECKING:
    from .sharded import Build, Sharded

#: Interval at which a rank that is not needed checks for an interrupt.
_LOOK_AGAIN = timedelta(seconds=1)
#: Longest wait until the ranks that are not needed have heard of the end.
_LAST_WORDS = timedelta(seconds=10)


class World:
    """The ranks that train together now; made by `attachment.attach`.

    Attributes
    ----------
    rank, width
        This process's number among the ranks, and the number of ranks.
    number
        Number of this composition. It grows at every change.
    built
        What the function given as ``build`` has made for this composition, by name.
    state
        The script's own variables, as in ``gpuslice.attach``. Rank 0's are those of all.
    """

    #: A restart needs rank 0's snapshot only (``training.attached``).
    replicated = True

    def __init__(
        self,
        process: Runtime,
        named: Mapping[str, object],
        sampler: ElasticSampler,
        backend: str | None,
        build: Build | None = None,
    ) -> None:
        self.rank = process.identity.rank
        self.width = self.number = 0
        self._process = process
        self._named = dict(named)
        self.state = State({}, self._named)
        objects = {name: item for name, item in self._named.items() if item is not sampler}
        self._attributes = JobAttributes(lambda: objects)
        self._training = process.next_training()
        self._ended = ""
        self._sampler = sampler
        self._build = build
        self._sharded: Sharded | None = None
        #: The whole state of sharded objects, on rank 0, as of the last gather or load.
        self._whole: dict[str, Any] = {}
        #: True if it was gathered at the present boundary.
        self._gathered = build is None
        tensors = _tensors_of(named)
        self._parameters = _parameters_in(tensors)
        gpus = {tensor.device for _, tensor in tensors if tensor.device.type == "cuda"}
        if backend == "nccl" and not gpus:
            gpus = {torch.device("cuda")}
        self._device = min(gpus, key=str, default=torch.device("cpu"))
        self._backend = backend or ("nccl" if gpus else "gloo")
        self._launched = group.width_of()
        self._store: Store | None = None
        self._requested_width = 0
        #: True if the present boundary was counted before this process reached it.
        self._counted = False
        self._between_batches = False

    @property
    def epoch(self) -> int:
        """Present epoch, from 0, also for a rank that was away when it began."""
        return self._sampler.epoch

    @property
    def built(self) -> Mapping[str, Any]:
        return {} if self._sharded is None else self._sharded.built

    @property
    def interruptible(self) -> bool:
        """True if this rank has the state of all ranks, so that any ranks can continue."""
        return self._gathered

    @property
    def samples(self) -> int:
        """Number of samples that the job has trained on, on all ranks and in all epochs."""
        return self._sampler.samples

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs from the present one to the last of ``count``."""
        while self._sampler.epoch < count:
            self._check_attached()
            yield self._sampler.epoch
            self._sampler.next_epoch()
        self._check_attached()
        trainings.finish(self._process)

    def batches(self, dataset: Dataset[Any], **options: Any) -> Iterator[Batch]:
        """Yield this rank's part of each remaining global batch of the epoch.

        Before each of them the job may be suspended, and ranks may come or go.

        Parameters
        ----------
        dataset
            The one that the attached sampler was made for.
        **options
            For the DataLoader that fetches the micro-batches: ``num_workers``, ``collate_fn``, ...

        Raises
        ------
        UsageError
            If the loop over a batch was left before its end.
        """
        sampler, feed, number = self._sampler, None, -1
        while sampler.more(self.width):
            self._check_attached()
            self._pass_boundary()
            if feed is None or number != self.number:
                even = self._build is not None
                feed = Feed(sampler, dataset, self.rank, self.width, options, even=even)
                number = self.number
            share = next(feed.shares, None)
            if share is None:  # for more ranks what is left is no batch any more
                return
            batch = Batch(share, feed.data, self._parameters, self._device)
            yield batch
            if batch.loss is None:
                raise UsageError(
                    "the loop over a batch was left before its end, so its gradients are not complete",
                    "go through all micro-batches before the optimizer's step",
                )
            sampler.advance(share)

    def resize(self, width: int) -> None:
        """Train on ``width`` ranks from the next batch on. All present ranks call this at the same batch.

        For a script without a scheduler. Ranks that are not needed wait until they are.

        Raises
        ------
        UsageError
            If the launcher has not started so many, or a scheduler decides.
        """
        if self._process.settings.socket:
            raise UsageError("the scheduler decides how many ranks there are", "leave out world.resize()")
        if not 1 <= width <= self._launched:
            raise UsageError(
                f"{width} ranks are not possible: {self._launched} were started",
                f"choose 1 to {self._launched}, or start more",
            )
        self._requested_width = width

    def named_state(self) -> dict[str, object]:
        """Return all that another process needs to continue from here."""
        return {
            **self._named,
            **self.state.named(),
            **self._attributes.state(),
            **state.own_state(self._position(), self._whole),
            identity.NAME: self._training.text(),
        }

    def end(self, cause: str) -> None:
        """Have the loops raise an error that names the cause."""
        self._ended = cause

    def _check_attached(self) -> None:
        if self._ended:
            raise UsageError(
                f"a loop continues after its job was detached: {self._ended}", "leave the loop before that"
            )

    def restartable(self, *, explicit: bool) -> bool:
        """Return True if another process could continue from here. Rank 0's state is that of all ranks."""
        if not (self.rank == 0 and self._between_batches and self._gathered):
            self._attributes.overlook()
            return False
        return trainings.can_be_saved(self._process, self._attributes)

    @property
    def obstacle(self) -> str:
        """Why no other process could have continued from the last checked boundary."""
        return self._attributes.obstacle

    @property
    def restartable_later(self) -> bool:
        """True if another process could continue from a later boundary."""
        return self.rank == 0

    def enter(self, ranks: int) -> None:
        """Begin with ``width`` ranks, or as the scheduler says. A rank that is not needed waits."""
        if self.rank == 0 and self._process.settings.job:
            self._load_newest_snapshot()
        at_end(self._end, os.getpid())
        membership = self._membership
        if membership is not None:
            self._form(membership.world, membership.width)
        elif self.rank < ranks:
            self._form(0, ranks)
        else:
            self._stand_by(0)
        self._counted = self._process.boundaries.count > 0

    @property
    def _membership(self) -> Membership | None:
        return self._process.membership

    def _pass_boundary(self) -> None:
        if self._counted:
            self._counted = False
            return
        self._between_batches = True
        self._gather_if_due()
        try:
            boundary()
        finally:
            self._between_batches = False
        membership = self._membership
        if membership is not None and membership.world != self.number:
            self._form(membership.world, membership.width)
        elif self._requested_width and self._requested_width != self.width:
            self._change(self._requested_width)
        if self._build is not None:
            self._gathered, self._whole = False, {}

    def _gather_if_due(self) -> None:
        """Gather what is sharded, if any rank may be suspended at the boundary to come, saves, or changes.

        All ranks have to agree, because it takes all of them; who hears of an order later than that is not
        suspended at this boundary (``interruptible``).
        """
        if self._sharded is None:
            return
        boundaries = self._process.boundaries
        first = min(boundaries.stop_at, boundaries.save_at)
        due = first <= boundaries.count + 1 or self._requested_width not in (0, self.width)
        agreed = torch.tensor([due], dtype=torch.int32, device=self._device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        if bool(agreed):
            self._whole, self._gathered = self._sharded.gather(), True

    def _change(self, width: int) -> None:
        number, self._requested_width = self.number, 0
        if self.rank == 0:
            self._connected().set(_key(number), str(width))
        if self.rank < width:
            self._form(number + 1, width)
        else:
            group.leave()
            self._stand_by(number)

    def _stand_by(self, number: int) -> None:
        """Wait until this rank is needed. If it never is, end the process with exit code 0."""
        store = self._connected()
        while True:
            while not _key_appears(store, _key(number), _LOOK_AGAIN):
                pass
            width = int(store.get(_key(number)))
            number += 1
            if not width:
                store.set(f"gone/{self.rank}", "")
                sys.exit()
            if self.rank < width:
                self._form(number, width)
                return

    def _form(self, number: int, width: int) -> None:
        """Join a group of ``width`` ranks, with rank 0's state; a collective."""
        group.form(self._connected(), number, self.rank, width, self._backend)
        grown = width > self.width and self._process.boundaries.count > 0
        self.number, self.width = number, width
        if self._build is not None:
            self._rebuild(self._build)
        own = state.share(
            self._named,
            self.state,
            self._attributes,
            state.Loaded(self._position(), self._whole),
            self._device,
            grown=grown,
        )
        if self._sharded is not None:
            self._sharded.load(own.whole)
        self._restore_position(own.position)

    def _rebuild(self, build: Build) -> None:
        """Make sharded objects for the present group. The first group keeps the parts that each rank made."""
        from .sharded import Sharded  # late: it takes a second to import

        self._sharded = Sharded(build(), self.width)
        self._parameters = _parameters_in(_tensors_of({**self._named, **self._sharded.built}))
        if self._sampler.scaling == "learning_rate":
            scale_rates(list(self._sharded.optimizers.values()), lambda: self.width)
        known = torch.tensor([bool(self._whole)], dtype=torch.int32, device=self._device)
        dist.broadcast(known, 0)
        if not bool(known):
            self._whole = self._sharded.gather()

    def _connected(self) -> Store:
        if self._store is None:
            self._store = group.connect(self.rank, self._launched, os.environ)
        return self._store

    def _load_newest_snapshot(self) -> None:
        """Load the named job's newest snapshot, if there is one."""
        snapshots = trainings.own_snapshots(self._process, self._training)
        newest = max(snapshots, default=-1)
        chosen = snapshots.pop(newest, None)
        for other in snapshots.values():
            other.close()
        trainings.explain_beginning(self._process, anew=chosen is None)
        if chosen is not None:
            with chosen:
                verify = self._process.settings.verify
                found = state.load(chosen, self._named, self.state, self._attributes, verify=verify)
                self._restore_position(found.position)
                self._process.boundaries.went_on_from = self._process.boundaries.count
                self._whole = found.whole
                job = self._process.settings.job
                trainings.tell(self._process, f"job {job} goes on from {identity.origin(chosen)}")

    def _position(self) -> dict[str, int]:
        return {"boundary": self._process.boundaries.count, "steps": self._process.boundaries.steps}

    def _restore_position(self, position: Mapping[str, int]) -> None:
        self._process.boundaries.count, self._process.boundaries.steps = (
            position["boundary"],
            position["steps"],
        )

    def _end(self, pid: int) -> None:
        """Tell the ranks that wait that the training is over."""
        if os.getpid() != pid or self._store is None:
            return
        waiting = [] if self._membership else range(self.width, self._launched)
        if self.rank == 0 and waiting and ended_well():
            self._store.set(_key(self.number), "0")
            for rank in waiting:  # the store may be this process's
                _key_appears(self._store, f"gone/{rank}", _LAST_WORDS)
        group.leave()


def _tensors_of(named: Mapping[str, object]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of all modules among ``named``, with their names."""
    return [
        (f"{name}.{path}", tensor)
        for name, module in named.items()
        if isinstance(module, torch.nn.Module)
        for path, tensor in named_tensors(module).items()
    ]


def _parameters_in(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.nn.Parameter]]:
    """Return each parameter once, under one of its names."""
    shared = {id(one): (path, one) for path, one in tensors if isinstance(one, torch.nn.Parameter)}
    return list(shared.values())


def _key(number: int) -> str:
    """Return the store's key for the width of what follows composition ``number``."""
    return f"next/{number}"


def _key_appears(store: Store, key: str, patience: timedelta) -> bool:
    """Wait for ``key`` in the store. Return True if it appeared in time."""
    try:
        store.wait([key], patience)
    except dist.DistStoreError:
        return False
    return True
