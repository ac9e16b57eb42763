"""``gpuslice nodes``: the machines and how they stand."""

from __future__ import annotations

from . import client_commands
from .options import Json, StateDir


def command(as_json: Json = False, state_dir: StateDir = None) -> int:
    """List all nodes: devices, state, jobs, and why one is left out.

    CLOCK is how far a node's clock is ahead of this one's. Lines are at most 100 columns wide.
    """
    return client_commands.nodes(as_json=as_json, state_dir=state_dir)
