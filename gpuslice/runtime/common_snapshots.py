"""Makes each rank of a gang keep the newest snapshot that all ranks have, until all have a newer one.

Ranks take their checkpoints at the same boundaries, but not at the same instant. A rank has two snapshots at
most, and may be killed at any time. The gang can go on only from a boundary of which all ranks have a
snapshot. So each rank announces to all others, on all nodes, which snapshots it has and which it is writing.

The announcements are one value in the store of the process group. Each decision is made from the value that
it replaces. No rank waits for another one, and none holds a lock that it could die with. A rank never
announces a snapshot that it does not have: it withdraws a snapshot before deleting it, and announces a new
one when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec
import torch
import torch.distributed as dist

from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.errors import UsageError
from gpuslice.runtime.ending import say
from gpuslice.runtime.shared_value import SharedValue, StoreUnavailableError

#: An upper bound for the number of restartable snapshots of a rank.
_MOST = 4
_NONE = -1


class Announced(msgspec.Struct, frozen=True, array_like=True):
    """What one rank announces: its restartable snapshots, and the boundary that it is writing.

    Attributes
    ----------
    has
        Boundaries of the rank's snapshots that another process can go on from, the newest one last.
    writing
        Boundary of the checkpoint that the rank is writing; None if it writes none.
    changes
        How often the rank has announced something. It makes all values of the store different.
    """

    has: tuple[int, ...]
    writing: int | None = None
    changes: int = 0


#: The announcements by rank. A rank that is missing has announced nothing yet, and may have any snapshot.
Announcements = dict[int, Announced]


def newest_common(boundaries: Iterable[Collection[int]]) -> int | None:
    """Return the newest boundary that all ranks have, given each rank's boundaries; None if there is none."""
    common = set.intersection(*(set(of_rank) for of_rank in boundaries))
    return max(common, default=None)


def agree(boundaries: Collection[int], world_size: int) -> list[set[int]]:
    """Exchange boundaries with all ranks. Return each rank's, up to the newest one that all have.

    Parameters
    ----------
    boundaries
        Boundaries of this rank's restartable snapshots.
    world_size
        Number of ranks of the job.

    Returns
    -------
    list of set of int
        For each rank, its boundaries up to the agreed one; empty sets if there is none.

    Raises
    ------
    UsageError
        If the ranks cannot talk to each other yet.
    """
    if world_size == 1:
        return [set(boundaries)]
    if not dist.is_initialized():
        raise UsageError(
            f"a named job of {world_size} ranks is attached before they can agree where to go on",
            "call torch.distributed.init_process_group before gpuslice.attach",
        )
    mine = torch.full((_MOST,), _NONE, dtype=torch.int64, device=_device_of_collectives())
    newest = sorted(boundaries)[-_MOST:]
    mine[: len(newest)] = torch.tensor(newest, dtype=torch.int64)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    found = [set(row.tolist()) - {_NONE} for row in everybody]
    common = newest_common(found)
    return [{one for one in of_rank if common is not None and one <= common} for of_rank in found]


def _device_of_collectives() -> torch.device:
    """Return the device for collectives: the host, if the process group takes its tensors; else the GPU."""
    host = torch.device("cpu")
    if host in dist.distributed_c10d._get_default_group()._device_types:
        return host
    return torch.device("cuda", torch.cuda.current_device())


class CommonSnapshots:
    """One rank's view of which snapshots all ranks have.

    Parameters
    ----------
    store
        The store of this rank's snapshots.
    rank
        Number of this rank.
    agreed
        The boundaries that each rank has, as returned by `agree` at the start.
    call_at_next
        Calls a given function at the next boundary.
    value
        The value that the ranks share.
    """

    def __init__(
        self,
        store: JobStore,
        rank: int,
        agreed: Sequence[Collection[int]],
        call_at_next: Callable[[Callable[[int], None]], object],
        value: SharedValue | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._call_at_next, self._listening = call_at_next, False
        self._world_size = len(agreed)
        self._value = value or SharedValue()
        self._changes = 0
        self._writing = False
        self._failure, self._complained = "", False
        #: The newest boundary that all ranks had when this rank last read the shared value.
        self._common = newest_common(agreed)
        # The first rank announces for all, as ``agreed`` says what each has. So every rank is always known.
        first = {one: Announced(tuple(sorted(has))) for one, has in enumerate(agreed)}
        self._say(lambda others: first[rank], first)
        store.finished = self.announce

    def announce(self) -> None:
        """Announce this rank's snapshots, after one has been published or given up."""
        self._say(lambda others: Announced(self._has))
        self._writing = False

    def listen(self) -> bool:
        """Read which snapshots the other ranks have by now, to know it if the store is gone later.

        Returns
        -------
        bool
            True if there is nothing more to learn before the next snapshot.
        """
        has, awaited = self._has, True
        if self._writing:
            return False
        if has[-1:] == (self._common,):
            return True

        def decide(others: Announcements) -> Announced:
            nonlocal awaited
            awaited = _awaited(has, others)
            return Announced(has)

        return self._say(decide) and not awaited

    def _listen_on(self) -> None:
        """Have `listen` called at each boundary from the next one on, until it returns True."""
        if not self._listening:
            self._listening = True
            self._call_at_next(self._listen_at)

    def _listen_at(self, boundary: int) -> None:
        self._listening = False
        if not self.listen():
            self._listen_on()

    def make_room(self, boundary: int) -> bool:
        """Prepare a checkpoint at ``boundary``, and keep the newest snapshot that all ranks have.

        Returns
        -------
        bool
            True if there is a slot for the checkpoint. There is none while another rank still writes its
            snapshot of the boundary of this rank's newest, or if it is unknown what the others have.
        """
        room, common = False, None

        def decide(others: Announcements) -> Announced:
            nonlocal room, common
            has, common = self._has, self._common_with(others)
            room = self._knows(others) and not _awaited(has, others)
            return Announced(_remaining(has, common), boundary) if room else Announced(has)

        if not self._say(decide):
            self._complain()
            return False
        if room:
            self._writing = True
            self._forget_after(common)
            self._listen_on()
        return room

    def keep(self) -> None:
        """Prepare a suspend: keep the newest snapshot that all ranks have, and forget newer ones.

        A rank may be killed before it has a snapshot of the suspend. If it is unknown what the others have,
        the newest boundary that all had when this rank last read the shared value is kept.
        """
        common: int | None = None

        def decide(others: Announcements) -> Announced:
            nonlocal common
            common = self._common_with(others) if self._knows(others) else self._common
            return Announced(_remaining(self._has, common))

        if not self._say(decide):
            self._complain()
            common = self._common
        self._forget_after(common)
        self._listen_on()

    def withdraw(self) -> None:
        """Announce that this rank has no snapshots, before they are removed at the training's end."""
        self._say(lambda others: Announced(()))
        self._writing = False

    @property
    def _has(self) -> tuple[int, ...]:
        return tuple(self._store.boundaries)

    def _knows(self, others: Announcements) -> bool:
        """Return True if ``others`` has an announcement of every other rank."""
        return len(others) == self._world_size - 1

    def _common_with(self, others: Announcements) -> int | None:
        return newest_common([self._has, *(one.has for one in others.values())])

    def _forget_after(self, boundary: int | None) -> None:
        """Forget this rank's snapshots newer than ``boundary``. The next snapshot takes their slot."""
        if boundary is not None:
            self._store.forget_after(boundary)

    def _say(self, decide: Callable[[Announcements], Announced], first: Announcements | None = None) -> bool:
        """Announce what ``decide`` makes of the others' announcements. Return False if the store has failed.

        ``first`` is taken for the shared value if no rank has announced anything yet.
        """
        result: Announcements = {}

        def change(value: str) -> str:
            nonlocal result
            gang = msgspec.json.decode(value, type=Announcements) if value else first or {}
            others = {rank: one for rank, one in gang.items() if rank != self._rank}
            self._changes += 1
            result = {**others, self._rank: msgspec.structs.replace(decide(others), changes=self._changes)}
            return msgspec.json.encode(result).decode()

        try:
            self._value.update(change)
        except StoreUnavailableError as error:
            self._failure = str(error)
            return False
        self._failure, self._complained = "", False
        if len(result) == self._world_size:
            self._common = newest_common(one.has for one in result.values())
        return True

    def _complain(self) -> None:
        """Print that the store is not available, once until it is available again."""
        if not self._complained:
            say(f"no checkpoints: the store of the process group is not available: {self._failure}")
        self._complained = True


def _awaited(has: Sequence[int], others: Announcements) -> bool:
    """Return True if another rank is still writing the boundary of this rank's newest snapshot."""
    return any(has and one.writing == has[-1] not in one.has for one in others.values())


def _remaining(has: Sequence[int], common: int | None) -> tuple[int, ...]:
    """Return the boundaries of ``has`` that stay when a new snapshot begins: the newest up to ``common``."""
    return tuple([boundary for boundary in has if common is None or boundary <= common][-1:])
