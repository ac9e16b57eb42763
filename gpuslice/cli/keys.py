"""``gpuslice keys``: CURVE keys, for schedulers that are reached by TCP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpuslice.sched_core.nodes import curve

app = typer.Typer(help="Make keys for a scheduler that is reached by TCP.")


@app.command()
def new(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that does not exist yet.")],
) -> None:
    """Make a directory with keys for a scheduler (`gpuslice up --curve-keys DIR`) and for one client."""
    curve.make(directory)
    typer.echo(f"{directory}: keys of a scheduler and of one client; keep it to yourself")


@app.command()
def add(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The scheduler's directory of keys.")],
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The client's name; remove accepted/NAME.public to undo it.")
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A directory that does not exist yet, for that client.")
    ],
) -> None:
    """Make keys for another client.

    The client may connect from now on. Bring OUT to them by a safe way.
    """
    curve.add(directory, name, out)
    typer.echo(f"{out}: keys of {name}, for --curve-keys there")
