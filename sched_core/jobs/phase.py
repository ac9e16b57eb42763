"""The state of a job, derived from its facts. It is stored nowhere.

What a job was told counts before what its ranks have done: a job that was told to stop is suspending until
all of its ranks are parked. The phases of the ranks alone do not tell the state. A job whose only process has
ended while its command goes on stays running if all of its ranks had arrived on their devices. Otherwise it
stays on its way there. That they had arrived is a fact of its own (``facts.Entry``).
"""

from __future__ import annotations

from .command import Command, Purpose
from .facts import Asked, Entry, Verdict, Way
from .states import JobState, Trigger

_ON_THE_WAY = {Way.START: JobState.STARTING, Way.RETURN: JobState.RESUMING}


def state_of(
    verdict: Verdict, command: Command, asked: Asked, entry: Entry, lease: tuple[int, ...]
) -> JobState:
    """Return the state of the job with these facts and devices."""
    if verdict.outcome is not None:
        return verdict.outcome
    if command.ending is Purpose.RELAUNCH:
        return JobState.RELAUNCHING
    if asked.stopping:
        return JobState.SUSPENDING
    if entry.way is not None:
        return _ON_THE_WAY[entry.way]
    if lease:
        return JobState.RUNNING
    return JobState.SUSPENDED if entry.had else JobState.QUEUED


def write(
    trigger: Trigger, state: JobState, verdict: Verdict, command: Command, asked: Asked, entry: Entry
) -> None:
    """Write the facts of ``trigger``, which leads to ``state``."""
    match trigger:
        case Trigger.GRANT:
            entry.grant()
        case Trigger.FOLLOW:
            entry.follow()
        case Trigger.ALL_ON:
            entry.arrived()
        case Trigger.REVOKE:
            asked.begin()
        case Trigger.STAY | Trigger.LATE_PARK:
            asked.end()
            entry.come_back()
        case Trigger.ALL_PARKED | Trigger.EMPTY:
            asked.end()
            entry.left()
        case Trigger.RELAUNCH:
            asked.end()
            command.end_for(Purpose.RELAUNCH)
        case Trigger.RETRY:
            asked.end()  # it may have failed while it was told to stop
            entry.renew()
            verdict.reopen()
            command.renew()
        case Trigger.SUCCEED | Trigger.FAIL | Trigger.CANCEL:
            verdict.decide(state)
