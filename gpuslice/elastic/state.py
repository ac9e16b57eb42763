"""Give rank 0's state to all ranks of a new process group: bit for bit, and nothing is unpickled."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gpuslice.checkpoint.attributes.job_attributes import JobAttributes
from gpuslice.checkpoint.format.reader import SnapshotFile, read_snapshot
from gpuslice.checkpoint.named import process_rng
from gpuslice.checkpoint.named.state import OWN_PREFIX, check, describe
from gpuslice.checkpoint.named.transfer import file_bytes, memory_file, write_state
from gpuslice.training.state import State, saved_names

_RNG, _POSITION, _SHARDED = f"{OWN_PREFIX}rng", f"{OWN_PREFIX}position", f"{OWN_PREFIX}sharded"
#: Name of rank 0's state in errors.
_NAME = Path("the state of rank 0")
#: Bytes of it that are sent at once.
_PART_BYTES = 64 << 20


class Loaded(NamedTuple):
    """What a loaded state has besides named objects: the position, and the parts that ranks divide.

    Attributes
    ----------
    position
        The position that was saved with the state.
    whole
        The state of what is divided among ranks (``sharded``); empty if nothing is.
    """

    position: dict[str, int]
    whole: dict[str, Any]


def own_state(position: Mapping[str, int], whole: Mapping[str, Any]) -> dict[str, object]:
    """Return the parts of a job's state that belong to no named object."""
    return {_RNG: process_rng.capture(), _POSITION: dict(position), _SHARDED: dict(whole)}


def load(
    snapshot: SnapshotFile,
    named: Mapping[str, object],
    values: State,
    attributes: JobAttributes,
    *,
    verify: bool = True,
) -> Loaded:
    """Load a state into the named objects and the script's values. Nothing changes if it does not fit.

    Parameters
    ----------
    attributes
        Attributes of the named objects.

    Raises
    ------
    SnapshotError
        If it is damaged, or does not fit the objects, naming the entry.
    """
    names = saved_names(snapshot)
    own = {**{name: values.get(name) for name in names}, **dict.fromkeys((_RNG, _POSITION, _SHARDED))}
    live = {**own, **named, **attributes.entries()}
    restoration = check(snapshot, live, entire=True, loose=names, verify=verify)
    process_rng.check(restoration.value(_RNG), restoration.gpus)
    attributes.revert()
    loaded = restoration.apply()
    values.data = {name: loaded[name] for name in names}
    process_rng.restore(loaded[_RNG], restoration.gpus)
    return Loaded(loaded[_POSITION], loaded[_SHARDED])


def share(
    named: Mapping[str, object],
    values: State,
    attributes: JobAttributes,
    own: Loaded,
    device: torch.device,
    *,
    grown: bool,
) -> Loaded:
    """Make all ranks hold what rank 0 holds; a collective.

    Parameters
    ----------
    attributes
        Attributes of the named objects. Those of rank 0 count.
    grown
        True if ranks may have come that lack what rank 0 has. Then what cannot be sent is an error.
    values
        The script's own.
    own
        Parts in no named object. Those of rank 0 count, and are returned on all ranks.
    device
        A device from which the process group can send.

    Raises
    ------
    UsageError
        If an object cannot be sent.
    SnapshotError
        If a rank has other objects than rank 0, or would lack an attribute that cannot be sent, naming the
        first.
    """
    leading = dist.get_rank() == 0
    with memory_file() as descriptor:
        if leading:
            attributes.overlook()  # the script may have run since the newest look
            beside = attributes.state()
            if attributes.obstacle and not grown:
                beside = {}
            write_state(descriptor, describe({**named, **values.named(), **beside, **own_state(*own)}))
        length = torch.tensor([os.fstat(descriptor).st_size], dtype=torch.int64, device=device)
        dist.broadcast(length, 0)
        os.truncate(descriptor, int(length))
        _broadcast(file_bytes(descriptor), device)
        if leading:
            return own
        with read_snapshot(descriptor, _NAME) as snapshot:
            return load(snapshot, named, values, attributes)


def _broadcast(buffer: torch.Tensor, device: torch.device) -> None:
    for part in buffer.split(_PART_BYTES):  # type: ignore[no-untyped-call]
        if device.type == "cpu":
            dist.broadcast(part, 0)
            continue
        moved = part.to(device)
        dist.broadcast(moved, 0)
        part.copy_(moved)
