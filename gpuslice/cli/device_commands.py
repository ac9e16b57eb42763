"""The commands about devices: what each asks of the scheduler, and what it prints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gpuslice.config import parse_moment
from gpuslice.errors import UsageError
from gpuslice.sched_core.jobs.closed_devices import at, owner
from gpuslice.verbs import DevicesChanged, ReservationInfo

from . import tables
from .client_commands import connect
from .job_choice import NOBODY
from .job_table import runs


def pause(
    devices: Sequence[str],
    *,
    for_time: str | None = None,
    as_json: bool = False,
    state_dir: str | Path | None = None,
) -> int:
    """Close devices to all jobs."""
    for_s = None if for_time is None else parse_moment(for_time, now := time.time()) - now
    with connect(state_dir) as client:
        changed = client.pause(_split(devices), for_s=for_s)
    until = changed.until_unix_s
    _said(changed, "paused" if until is None else f"paused until {at(until, time.time())}", as_json)
    return 0


def unpause(devices: Sequence[str], *, as_json: bool = False, state_dir: str | Path | None = None) -> int:
    """Open paused devices."""
    with connect(state_dir) as client:
        _said(client.unpause(_split(devices)), "not paused any more", as_json)
    return 0


def drain(devices: Sequence[str], *, as_json: bool = False, state_dir: str | Path | None = None) -> int:
    """Let no job begin on devices."""
    with connect(state_dir) as client:
        _said(client.drain(_split(devices)), "drained: no job begins there", as_json)
    return 0


def undrain(devices: Sequence[str], *, as_json: bool = False, state_dir: str | Path | None = None) -> int:
    """Let jobs begin on drained devices."""
    with connect(state_dir) as client:
        _said(client.undrain(_split(devices)), "not drained any more", as_json)
    return 0


def reserve(
    devices: Sequence[str],
    *,
    begin: str | None,
    end: str | None,
    user: str | None,
    as_json: bool = False,
    state_dir: str | Path | None = None,
) -> int:
    """Reserve devices for the jobs of one tenant."""
    if not devices:
        raise UsageError("no device is named", "name devices, as cuda:0,cuda:1; --list shows reservations")
    if end is None:
        raise UsageError("--end is missing", "write a local time as 12:00, or 3h")
    now_s = time.time()
    begin_s = now_s if begin is None else parse_moment(begin, now_s)
    end_s = parse_moment(end, begin_s)
    tenant = "" if user in (None, NOBODY) else user
    with connect(state_dir) as client:
        changed = client.reserve(
            _split(devices), begin_in_s=begin_s - now_s, end_in_s=end_s - now_s, user=tenant or ""
        )
    if as_json:
        print(msgspec.json.encode(changed.reservation).decode())
    elif changed.reservation is not None:
        print(_sentence(changed.reservation))
    return 0


def reservations(*, as_json: bool = False, state_dir: str | Path | None = None) -> int:
    """Print all reservations."""
    with connect(state_dir) as client:
        found = client.status().reservations
    if as_json:
        print(msgspec.json.encode(found).decode())
        return 0
    rows = [("ID", "DEVICES", "BEGIN", "END", "USER", "STATE")]
    for one in found:
        state = "now" if one.active else "later"
        when = (at(one.begin_unix_s), at(one.end_unix_s))
        rows.append((one.id, ",".join(runs(one.devices)), *when, one.user or NOBODY, state))
    tables.show(rows)
    return 0


def unreserve(reservation: str, *, as_json: bool = False, state_dir: str | Path | None = None) -> int:
    """End a reservation."""
    with connect(state_dir) as client:
        _said(client.unreserve(reservation), "not reserved any more", as_json)
    return 0


def _split(words: Sequence[str]) -> list[str]:
    """Return the names in ``words``, each of which may be several with commas between them."""
    return [name for word in words for part in word.split(",") if (name := part.strip())]


def _said(changed: DevicesChanged, what: str, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(changed).decode())
        return
    verb = "is" if len(changed.devices) == 1 else "are"
    print(f"{', '.join(runs(changed.devices))} {verb} {what}")


def _sentence(one: ReservationInfo) -> str:
    now_s = time.time()
    return (
        f"{one.id}: {', '.join(runs(one.devices))} for {owner(one.user)}"
        f" from {at(one.begin_unix_s, now_s)} to {at(one.end_unix_s, now_s)}"
    )
