"""Named state in a file in memory: arrives bit for bit, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpuslice.checkpoint.format.reader import read_snapshot
from gpuslice.checkpoint.named.state import Restoration, check, describe
from gpuslice.checkpoint.named.transfer import file_bytes, memory_file, write_state
from gpuslice.errors import CorruptSnapshotError, RefusedSnapshotError, SnapshotError

NAME = Path("the state of rank 0")


def objects(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    model[2].weight = model[0].weight  # tied
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "half": torch.randn(5).bfloat16(), "best": seed}


@pytest.fixture
def sent() -> Iterator[int]:
    with memory_file() as descriptor:
        write_state(descriptor, describe(objects(1)))
        yield descriptor


def compared(descriptor: int, named: dict[str, Any]) -> Restoration:
    return check(read_snapshot(descriptor, NAME), named, entire=True)


def everything(named: dict[str, Any]) -> tuple[object, ...]:
    state = describe(named)
    return state.tree, [(path, tensor.float().tolist()) for path, tensor in state.tensors]


def test_what_arrives_is_what_was_sent(sent: int) -> None:
    ours = objects(2)
    with memory_file() as received:
        os.truncate(received, os.fstat(sent).st_size)
        file_bytes(received).copy_(file_bytes(sent))
        loaded = compared(received, ours).apply()
    assert everything(loaded) == everything(objects(1))
    assert ours["model"][2].weight is ours["model"][0].weight


def test_damage_is_found(sent: int) -> None:
    snapshot = read_snapshot(sent, NAME)
    for offset in snapshot.offsets:
        file_bytes(sent)[offset] ^= 1
        with pytest.raises(CorruptSnapshotError, match="the state of rank 0: storage"):
            compared(sent, objects(2))
        file_bytes(sent)[offset] ^= 1
    compared(sent, objects(2)).apply()


def test_other_objects_are_refused_by_name(sent: int) -> None:
    with pytest.raises(RefusedSnapshotError, match="the state of rank 0 holds no 'other'"):
        compared(sent, {**objects(1), "other": torch.zeros(1)})


def test_nothing_but_what_was_sent_is_read(sent: int) -> None:
    record, data = read_snapshot(sent, NAME).record, file_bytes(sent)
    around = [*range(0, record.payload, 501), *range(record.tail, record.file_len, 101)]
    for place in around:
        data[place] ^= 0x41
        with pytest.raises(SnapshotError):
            compared(sent, objects(2))
        data[place] ^= 0x41
    os.truncate(sent, record.file_len - 1)
    with pytest.raises(CorruptSnapshotError, match="truncated"):
        compared(sent, objects(2))
