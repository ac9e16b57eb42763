"""``gpuslice submit``: hand a training job in."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec

from gpuslice.client.job_options import from_command_line, from_file, job_options
from gpuslice.errors import UsageError
from gpuslice.job_request import ArrayRequest, JobRequest

from .client_commands import connect
from .declare import Option, with_options
from .options import Json, StateDir, Words


def declared(request: type[JobRequest]) -> dict[str, Any]:
    """Return how a command takes each option of ``request``: an annotation by key."""
    found = {}
    for key, one in job_options(request).items():
        repeated = one.is_table or one.is_list
        taken: Any = bool if one.is_switch else list[str] | None if repeated else str | None
        option = Option(one.flag, metavar=one.option.metavar or None, help=one.help, group=one.option.group)
        found[key] = Annotated[taken, option]
    return found


@with_options(declared(ArrayRequest))
def command(
    words: Words = None,
    file: Annotated[
        Path | None,
        Option(
            metavar="job.toml", help="Take command and options from this file; those given beside it win."
        ),
    ] = None,
    as_json: Json = False,
    state_dir: StateDir = None,
    **given: Any,
) -> int:
    """Submit a job and print its id, or many jobs: one id a line.

    When its turn comes, it runs in this directory and with this environment.
    """
    command, fields = ([], {}) if file is None else from_file(file, ArrayRequest)
    chosen = from_command_line(given, ArrayRequest)
    env = fields.get("env", {}) | chosen.get("env", {})
    fields |= chosen | {"env": env}
    if fields.get("guaranteed") and sys.stderr.isatty():
        sys.stderr.write("gpuslice: waiting until it is known whether its deadline can be guaranteed\n")
    many = bool(fields.get("array") or fields.get("grid"))
    if "at_once" in fields and not many:
        raise UsageError("--at-once is for --array and --grid", "add one of them, or leave it out")
    with connect(state_dir) as client:
        submit = client.submit_array if many else client.submit
        jobs = submit(words or command, **fields)
    shown: object = {"jobs": jobs} if many else {"id": jobs}
    print(msgspec.json.encode(shown).decode() if as_json else "\n".join(jobs) if many else jobs)
    return 0
