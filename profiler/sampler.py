"""One thread that reads all instruments again and again, and keeps statistics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from .devices import DeviceReader, Reading


class DeviceUse(msgspec.Struct, frozen=True):
    """Statistics of a device's readings: means, and the most memory. None: no reading had the value.

    Attributes
    ----------
    utilization
        Mean, per cent.
    memory_used
        The most, MiB.
    power_draw
        Mean, W.
    readings
        How many there were.
    """

    device: str
    utilization: float | None
    memory_used: float | None
    power_draw: float | None
    readings: int


class Sampler:
    """Reads ``readers`` every ``interval_s`` in a thread of its own; a context manager.

    Parameters
    ----------
    taken
        Called in that thread with every set of readings.

    Raises
    ------
    Exception
        From ``__exit__``: what reading raised, if it failed; it ended then.
    """

    def __init__(
        self,
        readers: Sequence[DeviceReader],
        interval_s: float = 1.0,
        taken: Callable[[list[Reading]], None] | None = None,
    ) -> None:
        self._readers = readers
        self._interval_s = interval_s
        self._taken = taken
        self._ended = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="gpuslice-sampler", daemon=True)
        self._lock = threading.Lock()
        self._counts: dict[str, _Counts] = {}

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    @property
    def running(self) -> bool:
        """True if the thread still reads. It ends by itself only if reading failed."""
        return self._thread.is_alive()

    def use(self) -> list[DeviceUse]:
        """Return the statistics so far, by device."""
        with self._lock:
            return [
                DeviceUse(
                    device,
                    counts.utilization.mean,
                    counts.memory_used,
                    counts.power_draw.mean,
                    counts.readings,
                )
                for device, counts in self._counts.items()
            ]

    def _run(self) -> None:
        try:
            # The first readings come after an interval: some values are rates since the last ones.
            while not self._ended.wait(self._interval_s):
                readings = [reading for reader in self._readers for reading in reader.read()]
                with self._lock:
                    for reading in readings:
                        self._counts.setdefault(reading.device, _Counts()).add(reading)
                if self._taken is not None:
                    self._taken(readings)
        except Exception as error:  # noqa: BLE001 (raised where the sampler is used)
            self._failure = error


@dataclass(slots=True)
class _Mean:
    """The mean of the known values."""

    total: float = 0.0
    values: int = 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total += value
            self.values += 1

    @property
    def mean(self) -> float | None:
        return self.total / self.values if self.values else None


@dataclass(slots=True)
class _Counts:
    """Running statistics of a device's readings."""

    utilization: _Mean = field(default_factory=_Mean)
    power_draw: _Mean = field(default_factory=_Mean)
    memory_used: float | None = None
    readings: int = 0

    def add(self, reading: Reading) -> None:
        self.utilization.add(reading.utilization)
        self.power_draw.add(reading.power_draw)
        if reading.memory_used is not None:
            self.memory_used = max(reading.memory_used, self.memory_used or 0.0)
        self.readings += 1
