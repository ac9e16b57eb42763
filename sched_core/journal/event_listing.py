"""The journal for people: its events without heartbeats and environments."""

from __future__ import annotations

import msgspec

from gpuslice.sched_core.lifecycle.events import (
    ArraySubmitted,
    Clocked,
    Computed,
    DevicesUsed,
    Event,
    Kept,
    Limited,
    Noted,
    Plain,
    PortFound,
    Reported,
    SettingsChanged,
    Submitted,
    TakenOver,
    WaitsAhead,
    Woken,
    job_of,
    named,
)
from gpuslice.verbs import EventInfo, History
from gpuslice.wire import MAX_MESSAGE_BYTES, Progress

from .journal import Journal

#: Fields that are no details of an event, or are said of each event, or may hold a secret.
_HIDDEN = frozenset({"job", "id", "rank", "version", "unix_s", "on_end", "notify"})
#: Most entries that are read for one answer.
_MOST = 500
#: An answer is no longer than this plus one entry. Ranks' errors can be long.
_MOST_BYTES = MAX_MESSAGE_BYTES // 4


def history(journal: Journal, after: int) -> History:
    """Return the next part of the journal after event ``after``."""
    shown: list[EventInfo] = []
    nbytes = 0
    wall_clock = journal.wall_clock()
    for number, at_s, event in journal.after(after, _MOST):
        if not _dull(event):
            info = _info(number, at_s, wall_clock.unix_s(at_s), event)
            nbytes += len(msgspec.msgpack.encode(info))
            if shown and nbytes > _MOST_BYTES:
                break
            shown.append(info)
        after = number
    return History(events=tuple(shown), after=after)


def _dull(event: Event) -> bool:
    return isinstance(event, Computed | DevicesUsed | Limited | PortFound | WaitsAhead | Woken) or (
        isinstance(event, Reported) and isinstance(event.message, Progress)
    )


def _info(number: int, at_s: float, unix_s: float | None, event: Event) -> EventInfo:
    told: msgspec.Struct = event
    if isinstance(event, Reported):
        told = event.message
    elif isinstance(event, Submitted | ArraySubmitted):
        told = event.spec
    fields = event.details if isinstance(event, Noted) else msgspec.structs.asdict(told)
    hidden = _HIDDEN - {"unix_s"} if isinstance(event, Clocked) else _HIDDEN
    details: dict[str, Plain] = {
        name: value for name, value in fields.items() if name not in hidden and isinstance(value, Plain)
    }
    attempt = details.get("attempt")
    if not isinstance(event, Noted) and isinstance(attempt, int):
        details["attempt"] = attempt + 1  # as notices count, for people
    if isinstance(event, Submitted | ArraySubmitted):
        details["deadline_s"] = event.spec.last_deadline_s
    if isinstance(event, ArraySubmitted):
        details["jobs"] = len(event.points)
    if isinstance(event, TakenOver):
        details["jobs"] = len(event.kept.jobs)
    if isinstance(event, SettingsChanged):
        details = {name: value for name, value in details.items() if value is not None}
        details |= {f"{event.policy}.{name}": text for name, text in (event.options or {}).items()}
        details |= {f"quota {tenant}": most for tenant, most in (event.quotas or {}).items()}
    if isinstance(event, Kept):
        details["step"] = event.keep.value if event.keep else "over"
    if isinstance(devices := getattr(event, "devices", None), tuple):
        details["devices"] = ",".join(devices)
    return EventInfo(
        number=number,
        at_s=at_s,
        what=named(event),
        job=job_of(event),
        rank=getattr(event, "rank", None),
        details=details,
        unix_s=unix_s,
    )
