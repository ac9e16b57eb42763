"""The nouns that every part shares: devices, routes, jobs, epochs, leases."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import NewType

from gpuslice.errors import UsageError

JobId = NewType("JobId", str)
Rank = NewType("Rank", int)
#: The fencing token of a lease: grows by one with every lease of a job; reports of older epochs are dropped.
Epoch = NewType("Epoch", int)

_DEVICE = re.compile(r"(cpu|cuda|null)(?::(\d{1,3}))?")
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True, order=True)
class DeviceName:
    """A device as the user writes it: ``cpu``, ``cpu:1``, ``cuda:0``, ``null:0``.

    ``cpu`` without an index is the whole host (index ``None``); ``cpu:1`` is slot 1 of the host.
    ``cuda`` means ``cuda:0``.
    """

    kind: str
    index: int | None

    @classmethod
    def parse(cls, text: str) -> DeviceName:
        """Read ``cpu:1`` and the like.

        Raises
        ------
        UsageError
            If ``text`` is not a device name.
        """
        match = _DEVICE.fullmatch(text)
        if match is None:
            raise UsageError(f"{text!r} is not a device", "write cpu, cpu:1 or cuda:0")
        kind, index = match.groups()
        if index is None:
            return cls(kind, None if kind == "cpu" else 0)
        return cls(kind, int(index))

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


class Route(Enum):
    """How a device is emptied; see docs/routes.md."""

    AUTO = "auto"
    TENSOR = "tensor"
    VMM = "vmm"
    DRIVER = "driver"

    @property
    def needs_gpu(self) -> bool:
        """Whether only GPUs can be emptied so."""
        return self in (Route.VMM, Route.DRIVER)


def job_id(text: str) -> JobId:
    """Check a job's name: 1 to 64 of letters, digits, ``_ . -``, starting with a letter or digit.

    Raises
    ------
    UsageError
        If the name could not be a file name.
    """
    if _JOB.fullmatch(text) is None:
        raise UsageError(f"{text!r} is not a job name", "use up to 64 letters, digits, '_', '.' or '-'")
    return JobId(text)


@dataclass(frozen=True, slots=True)
class Lease:
    """A gang's right to its devices until told otherwise.

    Attributes
    ----------
    job
        Who holds it.
    epoch
        Fencing token.
    placement
        One device per rank, rank order.
    deadline_s
        When the quantum ends (clock of whoever granted it), or ``None`` for no end.
    """

    job: JobId
    epoch: Epoch
    placement: tuple[DeviceName, ...]
    deadline_s: float | None = None
