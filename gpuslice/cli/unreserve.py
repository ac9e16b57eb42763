"""``gpuslice unreserve``: end a reservation."""

from __future__ import annotations

from typing import Annotated

from . import device_commands
from .declare import Argument
from .options import Json, StateDir


def command(
    reservation: Annotated[str, Argument(metavar="ID", help="As `reserve --list` shows it.")],
    as_json: Json = False,
    state_dir: StateDir = None,
) -> int:
    """End a reservation, or do not begin it."""
    return device_commands.unreserve(reservation, as_json=as_json, state_dir=state_dir)
