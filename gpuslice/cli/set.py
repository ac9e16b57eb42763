"""``gpuslice set``: change a job's weight, priority or time limit."""

from __future__ import annotations

from typing import Annotated

from gpuslice.client.job_options import job_options
from gpuslice.errors import UsageError
from gpuslice.sched_core.options import nearest

from .client_commands import connect, print_done
from .declare import Argument, Option
from .options import Json, StateDir

_KEYS = ("weight", "priority", "time-limit")


def command(
    settings: Annotated[
        list[str], Argument(metavar="KEY=VALUE...", help="weight, priority or time-limit, as of `submit`.")
    ],
    job: Annotated[str, Option(metavar="JOB", help="The job to change.")],
    as_json: Json = False,
    state_dir: StateDir = None,
) -> int:
    """Change a job's weight, priority or time limit.

    Write for instance gpuslice set --job JOB priority=5 time-limit=8h
    """
    changes: dict[str, object] = {}
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
