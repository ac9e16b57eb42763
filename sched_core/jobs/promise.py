"""The promise of a device that another job is about to leave."""

from __future__ import annotations

import msgspec

from gpuslice.wire import FromAgent


class Promise(msgspec.Struct):
    """Of a device to a parked job.

    Attributes
    ----------
    giver
        Who is on it.
    device
        Which.
    epoch
        Of the lease to come.
    withdrawn
        Whether the heir was asked to decline.
    early
        What the heir has said under that epoch, the oldest first, of heartbeats only the newest.
    """

    giver: str
    device: int
    epoch: int
    withdrawn: bool = False
    early: list[FromAgent] = msgspec.field(default_factory=list)
