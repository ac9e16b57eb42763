"""All of an arena's chunks compared with their checksums, behind what the caller does meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import numpy as np

from . import sums
from .copying import Expecting, run, wait_for
from .host import view_address


class Look:
    """Begins at once, with one thread less than there may be; as a context manager, ends with the block.

    The threads wait for no GIL: C shares the chunks out among them (copying.c). Without it `finish` does all.

    Parameters
    ----------
    arena
        The bytes; nothing is written.
    inspect
        What they should be.
    threads
        The most that look at once, the caller of `finish` among them.
    """

    def __init__(self, arena: memoryview, inspect: Expecting, threads: int) -> None:
        chunks = inspect.expected.chunks
        if len(chunks) and int(chunks[-1, 1]) > len(arena):
            raise ValueError(f"there are checksums up to byte {int(chunks[-1, 1])} of {len(arena)}")
        self._arena, self._inspect, self._threads = arena, inspect, threads
        self._failures: list[BaseException] = []
        self._crew: list[threading.Thread] = []
        self._find: Callable[[], None] | None = None
        copier, _ = sums.load()
        if copier is None:
            return
        rows, self._next = _rows(arena, chunks), np.zeros(1, np.uint64)
        # `find` does not know this object, which has it: so the arena is let go of with its last user.
        following, failures = self._next, self._failures

        def find() -> None:
            try:
                copier.find_damaged(rows, inspect.expected, following)
            except BaseException as error:  # noqa: BLE001 - raised again by `finish`
                failures.append(error)

        self._find = find
        with suppress(RuntimeError):  # the system gives no more threads; `finish` does it alone
            for number in range(1, min(threads, len(chunks))):
                thread = threading.Thread(target=find, name=f"gpuslice-look-{number}", daemon=True)
                thread.start()
                self._crew.append(thread)

    def finish(self) -> None:
        """Look at what nobody has looked at yet, and wait for the others.

        Raises
        ------
        Exception
            ``damaged`` of what is expected, for one of the chunks that are something else.
        """
        if self._find is None:
            self._by_python()
            return
        self._find()
        wait_for(self._crew, self._failures)
        if self._failures:
            raise self._failures[0]

    def _by_python(self) -> None:
        def see(chunk: tuple[int, int]) -> None:
            self._inspect(chunk[0], self._arena[chunk[0] : chunk[1]])

        run([[(start, end)] for start, end in self._inspect.expected.chunks.tolist()], see, self._threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whatever happens, nobody reads the arena afterwards."""
        if self._find is not None:
            self._next[0] = np.iinfo(np.int64).max
            interrupts: list[BaseException] = []
            wait_for(self._crew, interrupts)
            if interrupts:
                raise interrupts[0]


def _rows(arena: memoryview, chunks: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The chunks as `sums.Copier` takes them, without a target."""
    start, nbytes = chunks[:, 0], chunks[:, 1] - chunks[:, 0]
    return sums.rows(
        view_address(arena) + start, np.zeros_like(start), nbytes, nbytes, np.arange(len(chunks))
    )
