"""The costs of one suspend and its resume: a row of the report's ``switches`` (docs/json.md)."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from gpuslice.clock import Clock, MonotonicClock
from gpuslice.kernels.host.process_memory import resident_anonymous_bytes
from gpuslice.kernels.transfer import Transfer

if TYPE_CHECKING:
    from gpuslice.kernels import Device

    from .capture_plan import CapturePlan


#: The stages of a suspend and of a resume, by the record's attributes for their seconds.
SUSPEND_STAGES = ("quiesce_s", "find_s", "admit_s", "copy_out_s", "publish_s", "free_s")
RESUME_STAGES = ("fetch_s", "reserve_s", "copy_in_s")

#: The key in ``held`` for what only NVML knows.
LIBRARIES = "context_and_libraries"


@dataclass(slots=True)
class SwitchRecord:
    """Bytes, seconds (``_s``) and rates of one switch (docs/json.md). Values of later steps are 0."""

    boundary: int
    route: str = "tensor"
    device: str = ""
    cold: bool = False
    bytes_found: int = 0
    bytes_copied: int = 0
    storages: int = 0
    bytes_unchanged: int = 0
    bytes_shared: int = 0
    bytes_freed: int = 0
    bytes_resident: int = 0
    bytes_unaccounted: int = 0
    quiesce_s: float = 0.0
    find_s: float = 0.0
    admit_s: float = 0.0
    copy_out_s: float = 0.0
    publish_s: float = 0.0
    free_s: float = 0.0
    parked_s: float = 0.0
    verified: bool = False
    fetch_s: float = 0.0
    reserve_s: float = 0.0
    copy_in_s: float = 0.0
    rss_before_bytes: int = 0
    rss_parked_bytes: int = 0
    rss_after_bytes: int = 0
    resident: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    bytes_communicators: int = 0
    copy_out: Transfer = field(default_factory=Transfer)
    copy_in: Transfer = field(default_factory=Transfer)
    registrations: int = 0
    page_faults: dict[str, int] = field(default_factory=dict)

    def record_memory(self, plan: CapturePlan, device: Device) -> None:
        """Record how many bytes a suspend has moved and left, now that ``device`` is empty."""
        self.bytes_copied = plan.layout.nbytes
        self.storages = len(plan.layout.storages)
        self.bytes_freed = plan.emptied_bytes
        self.resident = plan.resident_bytes
        self.bytes_resident = sum(plan.resident_bytes.values())
        self.bytes_found = self.bytes_freed + self.bytes_resident
        self.bytes_unaccounted = plan.unaccounted_bytes(device)
        self.rss_parked_bytes = resident_anonymous_bytes()
        self.held = self._held_on(device)

    def _held_on(self, device: Device) -> dict[str, int]:
        return device.held(self.bytes_freed if self.route == "vmm" else 0)

    def leave(self, reason: str, nbytes: int) -> None:
        """Record bytes of the device that no Python object holds and that a suspend leaves there."""
        if nbytes:
            self.resident[reason] = self.resident.get(reason, 0) + nbytes
            self.bytes_resident += nbytes
            self.bytes_found += nbytes
            self.bytes_unaccounted = max(0, self.bytes_unaccounted - nbytes)

    def leave_communicators(self, released_bytes: int, held_bytes: int) -> None:
        """Record how much of NCCL's memory is released while parked, and how much stays."""
        self.bytes_communicators = released_bytes
        if LIBRARIES in self.held:
            self.held[LIBRARIES] = max(0, self.held[LIBRARIES] - released_bytes - held_bytes)
        if held_bytes:
            self.held["communicators"] = held_bytes

    @property
    def gb_per_s_out(self) -> float:
        """Rate of the copy out of the device, in 1e9 bytes per second."""
        return _rate(self.bytes_copied, self.copy_out_s)

    @property
    def gb_per_s_in(self) -> float:
        """Rate of taking memory and filling it, in 1e9 bytes per second."""
        return _rate(self.bytes_freed, self.reserve_s + self.copy_in_s)

    @property
    def suspend_s(self) -> float:
        """Duration of the whole suspend."""
        return sum(self.suspend_stages_s().values())

    @property
    def resume_s(self) -> float:
        """Duration of the whole resume, up to where the training continues."""
        return sum(self.resume_stages_s().values())

    @property
    def blackout_s(self) -> float:
        """Time that the job lost: the suspend and the resume."""
        return self.suspend_s + self.resume_s

    def suspend_stages_s(self) -> dict[str, float]:
        """Return the seconds of every stage of the suspend."""
        return {name: getattr(self, name) for name in SUSPEND_STAGES}

    def resume_stages_s(self) -> dict[str, float]:
        """Return the seconds of every stage of the resume."""
        return {name: getattr(self, name) for name in RESUME_STAGES}

    def as_dict(self) -> dict[str, object]:
        """Return the keys of the report and their values."""
        row: dict[str, object] = asdict(self)
        return row | {"gb_per_s_out": self.gb_per_s_out, "gb_per_s_in": self.gb_per_s_in}


class Stages:
    """Times the stages of a record.

    Parameters
    ----------
    record
        Gets the seconds, in the attributes named by `stage`.
    """

    def __init__(self, record: SwitchRecord, clock: Clock | None = None) -> None:
        self.record = record
        self._clock = clock or MonotonicClock()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time inside the block to attribute ``name``, and its page faults to ``page_faults``."""
        start_s, faults_before = self._clock.now(), _page_faults()
        try:
            yield
        finally:
            spent_s = self._clock.now() - start_s
            setattr(self.record, name, getattr(self.record, name) + spent_s)
            faults, stage = self.record.page_faults, name.removesuffix("_s")
            faults[stage] = faults.get(stage, 0) + _page_faults() - faults_before


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / seconds / 1e9 if seconds > 0 else 0.0
