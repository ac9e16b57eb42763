"""``gpuslice events``: what happened, from the journal."""

from __future__ import annotations

import threading
from typing import Annotated

import msgspec
import typer

from gpuslice.verbs import EventInfo

from .scheduling import Json, StateDir, connect

_LOOK_AGAIN_S = 0.5


def command(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Print what happened to the jobs, one event per line, the oldest first; heartbeats are left out."""
    pause = threading.Event()
    newest = 0
    with connect(state_dir) as client:
        while True:
            for event in client.events(newest):
                newest = event.number
                print(msgspec.json.encode(event).decode() if as_json else _line(event), flush=True)
            if not follow:
                return
            pause.wait(_LOOK_AGAIN_S)


def _line(event: EventInfo) -> str:
    who = event.job if event.rank is None else f"{event.job}:{event.rank}"
    details = " ".join(f"{name}={value}" for name, value in event.details.items() if value not in ("", None))
    return f"{event.at_s:.3f}\t{who}\t{event.what}\t{details}"
