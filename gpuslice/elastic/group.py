"""Successive process groups: each has its own names in one store that outlives them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from gpuslice.errors import UsageError

#: Longest wait for the other ranks, whose scripts may still be loading data.
_PATIENCE = timedelta(minutes=30)
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def connect(rank: int, width: int, environ: Mapping[str, str]) -> Store:
    """Return the store of all ranks that the launcher started: the launcher's own, or rank 0's.

    Raises
    ------
    UsageError
        If the launcher did not say where.
    """
    if width == 1:
        return HashStore()
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise UsageError(
            f"{missing[0]} is not set, so the {width} ranks cannot find each other",
            "start the script with torchrun, or set the variable",
        )
    master = rank == 0 and environ.get(_AGENT_STORE) != str(True)
    store = TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=master,
        timeout=_PATIENCE,
        wait_for_workers=False,
    )
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"gpuslice/{attempt}", store)


def form(store: Store, world: int, rank: int, width: int, backend: str) -> None:
    """Leave the default process group, if there is one, and form that of ``world``; a collective."""
    leave()
    dist.init_process_group(
        backend,
        store=PrefixStore(f"world/{world}", store),
        rank=rank,
        world_size=width,
        timeout=_PATIENCE,
    )


def leave() -> None:
    """Leave the default process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def width_of(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks the launcher started."""
    return int(environ.get("WORLD_SIZE", "1"))
