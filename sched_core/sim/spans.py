"""Who held which devices when: columns, as a million jobs have several million spans."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Span:
    """One stretch of time that a job held devices for, from ``start_s`` to ``end_s``."""

    job: int
    start_s: float
    end_s: float
    devices: tuple[int, ...]


class Spans:
    """Spans in the order in which they were added; takes about 40 bytes for one of two devices."""

    def __init__(self) -> None:
        self._job = array("i")
        self._start_s = array("d")
        self._end_s = array("d")
        #: Where the devices of each span end in ``_devices``.
        self._until = array("q")
        self._devices = array("i")

    def __len__(self) -> int:
        return len(self._job)

    def __iter__(self) -> Iterator[Span]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spans) and self._columns() == other._columns()

    def __getitem__(self, index: int) -> Span:
        index = range(len(self))[index]
        first = self._until[index - 1] if index else 0
        devices = tuple(self._devices[first : self._until[index]])
        return Span(self._job[index], self._start_s[index], self._end_s[index], devices)

    def add(self, job: int, start_s: float, end_s: float, devices: Sequence[int]) -> None:
        """Append one span."""
        self._job.append(job)
        self._start_s.append(start_s)
        self._end_s.append(end_s)
        self._devices.extend(devices)
        self._until.append(len(self._devices))

    def extend(
        self,
        job: NDArray[np.int32],
        start_s: NDArray[np.float64],
        end_s: NDArray[np.float64],
        counts: NDArray[np.int64],
        devices: NDArray[np.int32],
    ) -> None:
        """Append one span for each entry of ``job``.

        Span ``i`` has ``counts[i]`` of ``devices``.
        """
        until = len(self._devices) + np.cumsum(counts, dtype=np.int64)
        added: tuple[NDArray[Any], ...] = (job, start_s, end_s, until, devices)
        for column, more in zip(self._columns(), added, strict=True):
            column.frombytes(more.tobytes())

    def _columns(self) -> tuple[array[Any], ...]:
        return self._job, self._start_s, self._end_s, self._until, self._devices

    def by_job(self, jobs: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the spans' numbers sorted by job, and where those of each job begin.

        Returns
        -------
        tuple
            Shapes ``(spans,)`` and ``(jobs + 1,)``.
        """
        # A copy: an array cannot grow while somebody looks at it.
        job = np.array(self._job, np.int32)
        order = np.argsort(job, kind="stable")
        return order, np.searchsorted(job[order], np.arange(jobs + 1))
