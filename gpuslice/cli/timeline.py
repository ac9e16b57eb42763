"""``gpuslice timeline``: a whole run as a trace for Perfetto."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from gpuslice.errors import NoSchedulerError, UsageError
from gpuslice.sched_core.journal.journal import FILE

from .client_commands import connect
from .options import Json, StateDir


def command(
    out: Annotated[Path, typer.Option(metavar="run.json.gz", help="Where to write it; .gz is compressed.")],
    journal: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read another journal, such as past-1/journal.sqlite.")
    ] = None,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Write the whole run as a trace for https://ui.perfetto.dev.

    It is read from the journal, so the scheduler may be up or down.
    """
    from gpuslice.daemon import run_timeline

    if not out.name.endswith((".json", ".json.gz")):
        raise UsageError(f"--out {out} is no .json or .json.gz", "write for instance --out run.json.gz")
    run = run_timeline.read(journal or _directory(state_dir) / FILE)
    drawn = run_timeline.timeline(run)
    try:
        drawn.write_chrome(out)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}", "choose another file") from error
    jobs = len({phase.job for phase in run.phases})
    duration_s, migrations = run.end_s - run.begin_s, len(drawn.flows)
    if as_json:
        found = {"path": str(out), "devices": len(run.devices), "jobs": jobs}
        typer.echo(json.dumps({**found, "migrations": migrations, "duration_s": duration_s}))
    else:
        typer.echo(
            f"{out}: {jobs} jobs on {len(run.devices)} devices over {duration_s:.1f} s, "
            f"{migrations} migrations; open it in https://ui.perfetto.dev"
        )


def _directory(state_dir: Path | None) -> Path:
    """Return the state directory of the user's scheduler. Print a line if none runs there."""
    with connect(state_dir) as client:
        if client.directory is None:
            raise UsageError(
                "a timeline is made of the journal, which is on the scheduler's machine and not here",
                "run `gpuslice timeline` there, or leave out --connect and GPUSLICE_CONNECT",
            )
        try:
            client.check_scheduler()
        except NoSchedulerError as error:
            if (client.directory / FILE).exists():
                sys.stderr.write(f"gpuslice: {error.message}: this is from its journal\n")
        return client.directory
