"""``gpuslice set``: change the scheduler's settings while it runs, or what was asked for a job."""

from __future__ import annotations

from typing import Annotated

import msgspec

from gpuslice.client.job_options import job_options
from gpuslice.errors import UsageError
from gpuslice.sched_core.options import nearest
from gpuslice.verbs import SettingInfo

from . import tables
from .client_commands import connect, print_done
from .declare import Argument, Option
from .options import Json, StateDir

_KEYS = ("weight", "priority", "time-limit")


def command(
    settings: Annotated[
        list[str] | None,
        Argument(
            metavar="[KEY=VALUE...]",
            help="Options of `up` without dashes, or POLICY.K=V. With --job: weight, priority or time-limit.",
        ),
    ] = None,
    job: Annotated[str, Option(metavar="JOB", help="The job to change.")] = "",
    as_json: Json = False,
    state_dir: StateDir = None,
) -> int:
    """Change settings while the scheduler runs.

    All that are given are changed, or none.
    Write for instance gpuslice set policy=las quantum=30s, or for a job
    gpuslice set --job JOB priority=5 time-limit=8h. Without KEY=VALUE, print all settings.
    """
    if job:
        return _change_job(job, settings or [], as_json=as_json, state_dir=state_dir)
    with connect(state_dir) as client:
        found = client.settings(*settings or ())
    if as_json:
        print(msgspec.json.encode({one.name: one.value for one in found}).decode())
    elif not settings:
        _print(found)
    return 0


def _print(found: tuple[SettingInfo, ...]) -> None:
    rows = [(one.name, one.value, "set" if one.changed else "") for one in found]
    tables.show([("SETTING", "VALUE", "CHANGED"), *rows])


def _change_job(job: str, settings: list[str], *, as_json: bool, state_dir: StateDir) -> int:
    changes: dict[str, object] = {}
    if not settings:
        raise UsageError("no setting of the job is named", f"write for instance --job {job} priority=5")
    for setting in settings:
        key, equals, value = setting.partition("=")
        if key not in _KEYS:
            raise UsageError(f"{key!r} is no setting of a job that can be changed", nearest(key, _KEYS))
        if not equals:
            raise UsageError(f"{setting} is not KEY=VALUE", f"write for instance {key}=2")
        changes |= job_options()[key.replace("-", "_")].from_words(value)
    with connect(state_dir) as client:
        client.adjust(job, **changes)  # type: ignore[arg-type]  # of their types by their options
    return print_done(as_json, id=job)
