"""The newest snapshot that all ranks of a gang have stays with each of them until all have a newer one.

Ranks take their checkpoints at the same boundaries, but not at the same instant. Any of them may be killed at
any time, and they can go on only from a boundary of which all have a snapshot; each has two at most. So each
announces to all others, on whichever node, which it has and which it is writing.

All of that is one value in the store of the process group, and each decision is made of the value that it
replaces. No rank waits for another one, and none holds a lock that it could die with. A rank never announces
what it does not have: it says that a snapshot goes before that goes, and that one is there when it is.
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

#: More restartable snapshots than a rank ever has.
_MOST = 4
_NONE = -1


class Announced(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has said.

    Attributes
    ----------
    has
        Boundaries of its snapshots that another process can go on from, the newest one last.
    writing
        That of the checkpoint that it writes.
    changes
        How often it has said something: no two values of the store are alike.
    """

    has: tuple[int, ...]
    writing: int | None = None
    changes: int = 0


#: By rank. A rank that is not there has said nothing yet, and may have anything.
Announcements = dict[int, Announced]


def newest_common(boundaries: Iterable[Collection[int]]) -> int | None:
    """The newest boundary that every rank has, given each rank's; ``None`` if there is none."""
    common = set.intersection(*(set(of_rank) for of_rank in boundaries))
    return max(common, default=None)


def agree(boundaries: Collection[int], world_size: int) -> list[set[int]]:
    """Have the ranks go on from the newest boundary that all have. A collective: every rank calls it.

    Parameters
    ----------
    boundaries
        Of this rank's restartable snapshots.
    world_size
        Ranks of the job.

    Returns
    -------
    list of set of int
        What each rank has up to that boundary; nothing if there is none.

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
    """The host, if the process group takes tensors of it; else the GPU."""
    host = torch.device("cpu")
    if host in dist.distributed_c10d._get_default_group()._device_types:
        return host
    return torch.device("cuda", torch.cuda.current_device())


class CommonSnapshots:
    """One rank's part in it: called before and after whatever changes its snapshots.

    Parameters
    ----------
    store
        Of this rank's snapshots.
    rank
        This one.
    agreed
        What each rank has, as all of them have agreed on at the start.
    call_at_next
        Calls what it is given at the next boundary.
    value
        What the ranks share.
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
        #: The newest one that all had when this rank last heard of them.
        self._common = newest_common(agreed)
        # Whoever is first speaks for all: everybody is known from the beginning.
        first = {one: Announced(tuple(sorted(has))) for one, has in enumerate(agreed)}
        self._say(lambda others: first[rank], first)
        store.finished = self.announce

    def announce(self) -> None:
        """Say what there is, when a snapshot has been published or given up."""
        self._say(lambda others: Announced(self._has))
        self._writing = False

    def listen(self) -> bool:
        """Hear what the others have got since then: to know it when the store is gone.

        Returns
        -------
        bool
            Whether there is nothing more to hear before the next snapshot.
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
        """Listen at each boundary from the next one on, until there is nothing more to hear."""
        if not self._listening:
            self._listening = True
            self._call_at_next(self._listen_at)

    def _listen_at(self, boundary: int) -> None:
        self._listening = False
        if not self.listen():
            self._listen_on()

    def make_room(self, boundary: int) -> bool:
        """Before a checkpoint, keep the newest snapshot that all ranks have.

        Returns
        -------
        bool
            Whether there is a slot besides it. There is none while another rank writes its own snapshot of
            the boundary of this one's newest, nor if it is not known what the others have.
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
        """Before a suspend, keep the newest snapshot that all ranks have, whatever else goes.

        One of them may be killed before it has a snapshot of the suspend. If it is not known what the others
        have, what all had when this rank last heard of them is kept.
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
        """Say that this rank has none any more, before they go: its training has ended."""
        self._say(lambda others: Announced(()))
        self._writing = False

    @property
    def _has(self) -> tuple[int, ...]:
        return tuple(self._store.boundaries)

    def _knows(self, others: Announcements) -> bool:
        """Whether these are all."""
        return len(others) == self._world_size - 1

    def _common_with(self, others: Announcements) -> int | None:
        return newest_common([self._has, *(one.has for one in others.values())])

    def _forget_after(self, boundary: int | None) -> None:
        """Forget what is newer than what all have: the next snapshot takes its slot."""
        if boundary is not None:
            self._store.forget_after(boundary)

    def _say(self, decide: Callable[[Announcements], Announced], first: Announcements | None = None) -> bool:
        """Announce what ``decide`` makes of the others' words; ``first`` is what all have if nobody has."""
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
        """Once until the store is there again."""
        if not self._complained:
            say(f"no checkpoints: the store of the process group is not available: {self._failure}")
        self._complained = True


def _awaited(has: Sequence[int], others: Announcements) -> bool:
    """Whether one of the others writes what is the newest that this rank ``has``."""
    return any(has and one.writing == has[-1] not in one.has for one in others.values())


def _remaining(has: Sequence[int], common: int | None) -> tuple[int, ...]:
    """What is left of snapshots when those after ``common`` are forgotten, and another one is begun."""
    return tuple([boundary for boundary in has if common is None or boundary <= common][-1:])
