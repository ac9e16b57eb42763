"""The states of a job, and the only table that says how it moves between them.

Rules
-----
- Everything that changes a job's state is a ``(state, trigger)`` of ``TRANSITIONS``; a pair that is not there
  is an error and changes nothing.
- A job holds devices in ``starting``, ``running``, ``suspending`` and ``resuming``, in no other live state
  but perhaps ``relaunching``; an ended job keeps them until its last process is gone.
- A resume that is refused is tried again under the same lease, and fails the job in the end: a gang whose
  other ranks have gone on cannot be taken back to the boundary where one of them still waits.
- A failed job may be queued again, for another attempt, at the moment its last process is gone. Waiters are
  notified only then.
- A job whose command is started anew for another number of devices keeps those that it has until its last
  process is gone. Then it is queued, and has the new ones once its ranks are there.
- Migration is not a state: it is a suspend, then a resume elsewhere.
"""

from __future__ import annotations

from enum import Enum


class JobState(Enum):
    """The states of a job."""

    QUEUED = "queued"  # accepted; its processes may be started and importing, none touches a device
    STARTING = "starting"  # first lease given, not all ranks have begun
    RUNNING = "running"
    SUSPENDING = "suspending"  # told to stop, not all ranks are parked
    SUSPENDED = "suspended"  # all ranks parked, no device
    RESUMING = "resuming"  # lease given, not all ranks are back on the device
    RELAUNCHING = "relaunching"  # told to end, to be started anew for another number of devices
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """True if the job, or its last attempt, has ended."""
        return self in ENDED


class Trigger(Enum):
    """The triggers that move a job to another state."""

    GRANT = "grant"  # the policy gives it a lease
    ALL_ON = "all ranks on the device"
    REVOKE = "revoke"  # the policy takes the lease back
    ALL_PARKED = "all ranks parked"
    STAY = "suspend refused"  # a rank could not suspend: the others come back, and the whole gang goes on
    LATE_PARK = "late park"  # a rank parked for a suspend that had been called off
    SUCCEED = "exit 0"
    FAIL = "failure"
    CANCEL = "cancel"
    RETRY = "started again"
    FOLLOW = "next processes"  # other processes are its ranks from now on, on the devices that it has
    EMPTY = "no process left"  # it gives its devices back until the next processes have come
    RELAUNCH = "to be started anew"  # for another number of devices


_S, _T = JobState, Trigger

TRANSITIONS: dict[tuple[JobState, Trigger], JobState] = {
    (_S.QUEUED, _T.GRANT): _S.STARTING,
    (_S.STARTING, _T.ALL_ON): _S.RUNNING,
    (_S.RUNNING, _T.REVOKE): _S.SUSPENDING,
    (_S.SUSPENDING, _T.ALL_PARKED): _S.SUSPENDED,
    (_S.SUSPENDING, _T.STAY): _S.RESUMING,
    (_S.RUNNING, _T.LATE_PARK): _S.RESUMING,
    (_S.SUSPENDED, _T.GRANT): _S.RESUMING,
    (_S.RESUMING, _T.ALL_ON): _S.RUNNING,
    (_S.STARTING, _T.FOLLOW): _S.STARTING,
    (_S.RUNNING, _T.FOLLOW): _S.STARTING,
    (_S.RESUMING, _T.FOLLOW): _S.STARTING,
    (_S.STARTING, _T.EMPTY): _S.SUSPENDED,
    (_S.RUNNING, _T.EMPTY): _S.SUSPENDED,
    (_S.SUSPENDING, _T.EMPTY): _S.SUSPENDED,
    (_S.RESUMING, _T.EMPTY): _S.SUSPENDED,
    (_S.FAILED, _T.RETRY): _S.QUEUED,
    (_S.SUSPENDING, _T.RELAUNCH): _S.RELAUNCHING,
    (_S.SUSPENDED, _T.RELAUNCH): _S.RELAUNCHING,
    (_S.QUEUED, _T.RELAUNCH): _S.RELAUNCHING,
    (_S.RELAUNCHING, _T.RETRY): _S.QUEUED,
    (_S.SUCCEEDED, _T.RETRY): _S.QUEUED,  # because its owner wants it again
    (_S.CANCELLED, _T.RETRY): _S.QUEUED,
}

LIVE = (
    *(_S.QUEUED, _S.STARTING, _S.RUNNING, _S.SUSPENDING, _S.SUSPENDED, _S.RESUMING),
    _S.RELAUNCHING,
)
ENDED = frozenset({_S.SUCCEEDED, _S.FAILED, _S.CANCELLED})
#: Live states in which the job's devices are its own.
HOLDING = frozenset({_S.STARTING, _S.RUNNING, _S.SUSPENDING, _S.RESUMING})
#: States that a job is in only until its ranks have got where they were told to go.
IN_TRANSIT = frozenset({_S.STARTING, _S.SUSPENDING, _S.RESUMING})

for _state in LIVE:
    TRANSITIONS |= {
        (_state, _T.SUCCEED): _S.SUCCEEDED,
        (_state, _T.FAIL): _S.FAILED,
        (_state, _T.CANCEL): _S.CANCELLED,
    }
