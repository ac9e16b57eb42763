"""``gpuslice timeline``: a whole run as a trace for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from gpuslice import config
from gpuslice.errors import UsageError

from .options import Json, StateDir


def command(
    out: Annotated[Path, typer.Option(metavar="run.json.gz", help="Where to write it; .gz is compressed.")],
    journal: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Another journal, such as past-1/journal.sqlite.")
    ] = None,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Write what devices and jobs did as a Chrome trace, which https://ui.perfetto.dev opens.

    It is told by the journal, so the scheduler may be up or down.
    """
    from gpuslice.daemon import run_timeline
    from gpuslice.sched_core.journal.journal import FILE

    if not out.name.endswith((".json", ".json.gz")):
        raise UsageError(f"--out {out} is no .json or .json.gz", "write for instance --out run.json.gz")
    run = run_timeline.read(journal or config.state_directory(state_dir) / FILE)
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
