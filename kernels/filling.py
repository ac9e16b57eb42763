"""Memory that is filled while more of it is still being taken back.

Taking memory writes to it: the C allocator puts a header before each storage, and for that the kernel clears
a huge page, in one thread and with the GIL. Meanwhile other threads copy into what has been taken already, in
C and without it. None of them is at work outside of `Filling.beside`; `Filling.finish` copies the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from . import apart, copying, malloc, sums
from .copying import Expecting, Inspector, Want, Wanted
from .host import HugePages
from .transfer import Transfer

#: What is taken before the others hear of it, where that comes in huge pages as it is.
_APART_BYTES = 16 << 20
#: And elsewhere: it is put behind huge pages then, and the block that two portions share stays in small ones.
_PORTION_BYTES = 64 << 20
#: What the calling thread copies before it looks for signals again.
_MOST_BYTES = 64 << 20
_ALL_BYTES = (1 << 64) - 1


def portions(wanted: Wanted, portion_bytes: int = _PORTION_BYTES) -> Iterator[Wanted]:
    """What is wanted, in portions, each to be taken and then followed before the next one."""
    portion: list[Want] = []
    room = portion_bytes
    for piece in wanted:
        portion.append(piece)
        room -= piece[1]
        if room <= 0:
            yield portion
            portion, room = [], portion_bytes
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
    large, small = apart.by_size(wanted)
    filling = Filling([*large, *small], arena, inspect, threads)

    def take_and_follow(some: Wanted, portion_bytes: int = _PORTION_BYTES) -> None:
        for portion in portions(some, portion_bytes):
            take(portion)
            filling.follow(portion)

    with filling.beside():
        portion_bytes = _APART_BYTES if malloc.may_set() else _PORTION_BYTES
        apart.take_apart(partial(take_and_follow, portion_bytes=portion_bytes), large)
        take_and_follow(small)
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
        # Without NumPy: it keeps small pieces of memory for later, here some of the state's heaps.
        taken = [(storage.data_ptr(), nbytes) for storage, nbytes, _ in portion]
        # The others lie in heaps that come in huge pages as they are.
        whole = frozenset(apart.begun())
        elsewhere = [one for one in taken if one[0] - one[0] % apart.HEAP_BYTES not in whole]
        HugePages(elsewhere).all_ready(elsewhere)
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
