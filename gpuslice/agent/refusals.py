"""The message to the scheduler about a suspend or resume that failed, and whether a retry may work."""

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

#: Most characters of an error, and of its remedy, in the message.
_ERROR_CHARACTERS = 4096
#: Errors that may not occur again, once there is more room.
_RETRYABLE = (AddressSpaceError, DeviceMemoryError, RamDiskFullError)
#: Errors after which a failed resume has changed nothing.
STILL_PARKED = (AddressSpaceError, DeviceMemoryError, SuspendRefusedError)


def refused(error: GpusliceError, epoch: int, boundary: int, *, running: bool) -> Refused:
    """Return the message that reports ``error``, which ended a suspend (``running``) or a resume."""
    return Refused(
        epoch=epoch,
        boundary=boundary,
        running=running,
        error=shortened(error.message, _ERROR_CHARACTERS),
        remedy=shortened(error.remedy, _ERROR_CHARACTERS),
        retryable=isinstance(error, _RETRYABLE) or (not running and isinstance(error, STILL_PARKED)),
    )
