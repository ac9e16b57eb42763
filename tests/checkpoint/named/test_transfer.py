"""Named state in one buffer: arrives bit for bit, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpuslice.checkpoint.named.state import check, describe
from gpuslice.checkpoint.named.transfer import Packed, pack, payload_bytes, unpack
from gpuslice.errors import CorruptSnapshotError, RefusedSnapshotError, SnapshotError


def objects(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    model[2].weight = model[0].weight  # tied
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "half": torch.randn(5).bfloat16(), "best": seed}


def packed(named: dict[str, Any]) -> Packed:
    return pack(describe(named))


def test_what_arrives_is_what_was_sent() -> None:
    theirs, ours = objects(1), objects(2)
    sent = packed(theirs)
    assert sent.payload.numel() == payload_bytes(sent.header)
    loaded = check(unpack(sent), ours, entire=True).apply()
    assert loaded["best"] == 1
    again = packed({**ours, "best": 1})
    assert (again.header, bytes(again.payload.numpy())) == (sent.header, bytes(sent.payload.numpy()))


def test_damage_is_found() -> None:
    sent = packed(objects(1))
    sent.payload[7] ^= 1
    with pytest.raises(CorruptSnapshotError, match="the state of rank 0: storage"):
        check(unpack(sent), objects(2))


def test_other_objects_are_refused_by_name() -> None:
    with pytest.raises(RefusedSnapshotError, match="holds no 'other'"):
        check(unpack(packed(objects(1))), {"other": torch.zeros(1)})


def test_nothing_but_what_was_packed_is_read() -> None:
    sent = packed(objects(1))
    header = bytearray(sent.header)
    for place in range(0, len(header), 5):
        changed = bytearray(header)
        changed[place] ^= 0x41
        with pytest.raises(SnapshotError):
            check(unpack(Packed(bytes(changed), sent.payload)), objects(2), entire=True).apply()
    with pytest.raises(CorruptSnapshotError, match="bytes, not"):
        unpack(Packed(sent.header, sent.payload[:-1]))
