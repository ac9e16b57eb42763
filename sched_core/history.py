"""The journal for people: what happened, without heartbeats and environments."""

from __future__ import annotations

import msgspec

from gpuslice.verbs import EventInfo, History
from gpuslice.wire import Progress

from .events import Computed, Event, Moved, Noted, Plain, Reported, Submitted, Woken
from .journal import Journal

#: Entries looked at for one answer; keeps it short.
_MOST = 500


def history(journal: Journal, after: int) -> History:
    """The next part of the journal that follows event ``after``."""
    entries = journal.after(after, _MOST)
    shown = [_info(*entry) for entry in entries if not _dull(entry[2])]
    return History(events=tuple(shown), after=entries[-1][0] if entries else after)


def _dull(event: Event) -> bool:
    return isinstance(event, Computed | Woken) or (
        isinstance(event, Reported) and isinstance(event.message, Progress)
    )


def _info(number: int, at_s: float, event: Event) -> EventInfo:
    told: msgspec.Struct = event
    if isinstance(event, Reported):
        told = event.message
    elif isinstance(event, Submitted):
        told = event.spec
    fields = event.details if isinstance(event, Noted) else msgspec.structs.asdict(told)
    job = event.spec.id if isinstance(event, Submitted) else getattr(event, "job", "")
    details: dict[str, Plain] = {
        name: value
        for name, value in fields.items()
        if name not in ("job", "id", "rank", "version") and isinstance(value, Plain)
    }
    if isinstance(event, Submitted):
        details["deadline_s"] = event.spec.deadline_s
    if isinstance(event, Moved):
        details["devices"] = ",".join(event.devices)
    what = str((event if isinstance(event, Submitted) else told).__struct_config__.tag)
    if isinstance(event, Noted):
        what = event.what
    return EventInfo(
        number=number, at_s=at_s, what=what, job=job, rank=getattr(event, "rank", None), details=details
    )
