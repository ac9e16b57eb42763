"""Rank 0's state, given to all ranks of a new process group: bit for bit, and nothing is unpickled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gpuslice.checkpoint.named import process_rng
from gpuslice.checkpoint.named.state import OWN_PREFIX, check, describe
from gpuslice.checkpoint.named.transfer import Packed, pack, payload_bytes, unpack

_RNG, _POSITION = f"{OWN_PREFIX}rng", f"{OWN_PREFIX}position"
#: How much of the payload is sent at once.
_PART_BYTES = 64 << 20


def own_state(position: Mapping[str, int]) -> dict[str, object]:
    """What belongs to a job's state besides what the script has named."""
    return {_RNG: process_rng.capture(), _POSITION: dict(position)}


def load(snapshot: Any, named: Mapping[str, object], *, verify: bool = True) -> dict[str, int]:
    """Load a state into the named objects; nothing has changed if it does not fit.

    Returns
    -------
    dict
        The position that was saved with it.

    Raises
    ------
    SnapshotError
        If it is damaged, or does not fit the objects, naming the entry.
    """
    restoration = check(snapshot, {**named, _RNG: None, _POSITION: None}, entire=True, verify=verify)
    process_rng.check(restoration.value(_RNG), restoration.gpus)
    loaded = restoration.apply()
    process_rng.restore(loaded[_RNG], restoration.gpus)
    position: dict[str, int] = loaded[_POSITION]
    return position


def share(named: Mapping[str, object], position: Mapping[str, int], device: torch.device) -> dict[str, int]:
    """Have all ranks hold what rank 0 holds; a collective.

    Parameters
    ----------
    device
        Where the process group can send from.

    Returns
    -------
    dict
        Rank 0's position.

    Raises
    ------
    UsageError
        If an object cannot be sent.
    SnapshotError
        If a rank has other objects than rank 0, naming the first.
    """
    packed = pack(describe({**named, **own_state(position)})) if dist.get_rank() == 0 else None
    received = _sent(packed, device)
    if packed is not None:
        return dict(position)
    snapshot = unpack(received)
    try:
        return load(snapshot, named)
    finally:
        snapshot.close()


def _sent(packed: Packed | None, device: torch.device) -> Packed:
    """The packed state of rank 0, on every rank."""
    length = torch.tensor([0 if packed is None else len(packed.header)], dtype=torch.int64, device=device)
    dist.broadcast(length, 0)
    header = torch.empty(int(length), dtype=torch.uint8)
    if packed is not None:
        header = torch.frombuffer(bytearray(packed.header), dtype=torch.uint8)
    _broadcast(header, device)
    if packed is None:
        words = header.numpy().tobytes()
        packed = Packed(words, torch.empty(payload_bytes(words), dtype=torch.uint8))
    _broadcast(packed.payload, device)
    return packed


def _broadcast(buffer: torch.Tensor, device: torch.device) -> None:
    for part in buffer.split(_PART_BYTES):  # type: ignore[no-untyped-call]
        if device.type == "cpu":
            dist.broadcast(part, 0)
            continue
        moved = part.to(device)
        dist.broadcast(moved, 0)
        part.copy_(moved)
