"""What the scheduler is told of a suspend or resume that failed, and whether it may work another time."""

from __future__ import annotations

from gpuslice.errors import (
    AddressSpaceError,
    DeviceMemoryError,
    GpusliceError,
    RamDiskFullError,
    SuspendRefusedError,
)
from gpuslice.types import shortened
from gpuslice.wire import Refused

#: Of an error that the scheduler is told.
_ERROR_CHARACTERS = 4096
#: Another attempt, with more room, may not meet these.
_RETRYABLE = (AddressSpaceError, DeviceMemoryError, RamDiskFullError)
#: After these a resume left everything as it was.
STILL_PARKED = (AddressSpaceError, DeviceMemoryError, SuspendRefusedError)


def refused(error: GpusliceError, epoch: int, boundary: int, *, running: bool) -> Refused:
    """Return what to tell of ``error``, which ended a suspend (``running``) or a resume."""
    return Refused(
        epoch=epoch,
        boundary=boundary,
        running=running,
        error=shortened(error.message, _ERROR_CHARACTERS),
        remedy=shortened(error.remedy, _ERROR_CHARACTERS),
        retryable=isinstance(error, _RETRYABLE) or (not running and isinstance(error, STILL_PARKED)),
    )
