"""The promise of a device that another job is about to leave."""

from __future__ import annotations

import msgspec

from gpuslice.wire import FromAgent


class Promise(msgspec.Struct):
    """Of a device to a parked job.

    Attributes
    ----------
    predecessor
        Who is on it.
    device
        Which.
    epoch
        Of the lease to come.
    withdrawn
        Whether the successor was asked to decline.
    early
        What the successor has said under that epoch, the oldest first, of heartbeats only the newest.
    """

    predecessor: str
    device: int
    epoch: int
    withdrawn: bool = False
    early: list[FromAgent] = msgspec.field(default_factory=list)
