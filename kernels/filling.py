"""Memory that is filled while more of it is still being taken back.

Taking memory writes to it: the C allocator puts a header before each storage, and for that the kernel clears
a huge page, in one thread and with the GIL. Meanwhile other threads copy into what has been taken already, in
C and without it. None of them is at work outside of `Filling.beside`; `Filling.finish` copies the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from . import copying, sums
from .copying import Expecting, Inspector, Want, Wanted
from .host import HugePages
from .transfer import Transfer

#: What is taken before the others hear of it, and put behind huge pages; the block that two portions share
#: stays in small ones.
_PORTION_BYTES = 64 << 20
#: What the calling thread copies before it looks for signals again.
_MOST_BYTES = 64 << 20
_ALL_BYTES = (1 << 64) - 1


def portions(wanted: Wanted) -> Iterator[Wanted]:
    """What is wanted, in portions, each to be taken and then followed before the next one."""
    portion: list[Want] = []
    room = _PORTION_BYTES
    for piece in wanted:
        portion.append(piece)
        room -= piece[1]
        if room <= 0:
            yield portion
            portion, room = [], _PORTION_BYTES
    if portion:
        yield portion


def fill(
    wanted: Wanted,
    arena: memoryview,
    take: Callable[[Wanted], None],
    threads: int,
    inspect: Inspector | None = None,
) -> Callable[[], Transfer]:
    """Take memory, and begin to fill it meanwhile; nobody copies any more when this returns or raises.

    Parameters
    ----------
    take
        Gives storages their bytes; what it raises is raised here.

    Returns
    -------
    callable
        `Filling.finish`.
    """
    filling = Filling(wanted, arena, inspect, threads)
    with filling.beside():
        for portion in portions(wanted):
            take(portion)
            filling.follow(portion)
    return filling.finish


class Filling:
    """Storages that are about to have memory, and to be filled.

    Where chunks are not copied by C, or an inspector must see each of them, all is copied by `finish`.

    Parameters
    ----------
    wanted
        In the order in which their memory is taken.
    """

    def __init__(
        self,
        wanted: Wanted,
        arena: memoryview,
        inspect: Inspector | None,
        threads: int,
    ) -> None:
        self._wanted, self._arena, self._inspect = wanted, arena, inspect
        self._threads = threads
        self._copier: sums.Copier | None = None
        if not wanted or not (inspect is None or isinstance(inspect, Expecting)):
            return
        self._copier, _ = sums.load()
        self._expected = inspect.expected if inspect else None
        self._places = [(0, offset, nbytes) for _, nbytes, offset in wanted]
        #: Without addresses yet: their targets are counted from the beginning of their storage.
        self._chunks = copying.incoming(self._places, arena, self._expected)
        self._targets = self._chunks[:, sums.TARGET].data
        self._advance = sums.Advance(len(self._chunks))
        self._ready = 0
        self._past_caches = copying.are_past_caches(self._places)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Others copy, inside, what has been followed; when this ends, in whatever way, nobody does."""
        if self._copier is None:
            yield
            return
        copier, failures = self._copier, list[BaseException]()
        most = -(-sum(nbytes for _, nbytes, _ in self._wanted) // copying.CHUNK_BYTES)
        crew = copying.others(partial(self._copy, _ALL_BYTES), min(self._threads, most))
        try:
            try:
                with suppress(RuntimeError):  # the system gives no more threads; fewer do the same, later
                    for thread in crew:
                        thread.start()
                yield
                copier.allow(self._advance, self._ready, over=True)
            finally:
                self._advance.row[sums.OVER] = 1  # not a call: nothing can interrupt it
        except BaseException as error:  # noqa: BLE001 - raised below, when the others have stopped
            failures.append(error)
        copying.wait_for(crew, failures)
        if failures:
            raise failures[0]

    def follow(self, portion: Wanted) -> None:
        """Its memory has been taken: it may be filled."""
        if self._copier is None:
            return
        taken = [(storage.data_ptr(), nbytes) for storage, nbytes, _ in portion]
        HugePages(taken).all_ready(taken)
        for address, nbytes in taken:
            for _ in range(-(-nbytes // copying.CHUNK_BYTES)):
                self._targets[self._ready] += address
                self._ready += 1
        self._copier.allow(self._advance, self._ready)

    def finish(self) -> Transfer:
        """Copy the rest.

        Raises
        ------
        Exception
            What the inspector raises. The storages then hold anything.
        """
        if self._copier is None:
            pairs = [(storage, offset) for storage, _, offset in self._wanted]
            return copying.copy_in(pairs, self._arena, self._inspect, self._threads)
        if self._advance.damaged == len(self._chunks):
            self._copier.allow(self._advance, self._ready)
            with self.beside():
                while self._copy(_MOST_BYTES):
                    pass
        self._copier.refuse_damaged(self._chunks, self._expected, self._advance)
        return copying.by_host(self._places, 0)

    def _copy(self, most_bytes: int) -> bool:
        """Copy what may be copied and nobody else has begun; whether there may be more."""
        assert self._copier is not None
        return self._copier.copy_ready(
            self._chunks, self._expected, self._past_caches, self._advance, most_bytes
        )
