"""Snapshots as checkpoints of torch.distributed.checkpoint, read by torch itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpuslice.checkpoint.format.layout import TensorSpec
from gpuslice.checkpoint.format.reader import SnapshotFile, open_snapshot
from gpuslice.checkpoint.named.export_dcp import ALONE, export_dcp
from gpuslice.checkpoint.named.snapshot_tensors import Source
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.errors import CorruptSnapshotError, EnvironmentUnusableError, UsageError

Save = Callable[..., SnapshotFile]


def loaded(path: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What torch reads into empty tensors."""
    from torch.distributed import checkpoint  # takes a second, which every worker's collection would

    tensors = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.load(tensors, storage_reader=checkpoint.FileSystemReader(path), **ALONE)
    return tensors


def test_torch_reads_what_was_exported(snapshot_path: Path, tmp_path: Path) -> None:
    with open_snapshot(snapshot_path) as snapshot:
        assert export_dcp(snapshot, tmp_path / "out") == len(snapshot.tensors)
        source = Source(snapshot)
        expected = {spec.path: source.tensor(spec).clone() for spec in snapshot.tensors}
    found = loaded(tmp_path / "out", expected)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.shape == expected[name].shape
        assert bytes_of(tensor) == bytes_of(expected[name]), name
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_tensors_of_the_same_name_stay_apart(disk: RamDisk, save: Save, tmp_path: Path) -> None:
    tensors = tuple(TensorSpec("w", 0, "uint8", (4,), (1,), offset) for offset in (0, 4))
    with disk.open_store("twins") as store:
        export_dcp(save(store, sizes=(8,), tensors=tensors), tmp_path / "out")
    found = loaded(tmp_path / "out", {"w": torch.empty(4).byte(), "w#2": torch.empty(4).byte()})
    assert bytes_of(found["w"]) != bytes_of(found["w#2"])


def test_damage_is_found_before_anything_is_written(snapshot_path: Path, tmp_path: Path) -> None:
    with snapshot_path.open("r+b") as file, open_snapshot(snapshot_path) as snapshot:
        file.seek(snapshot.record.payload + 100)
        file.write(b"\xff\x00\xff")
        file.flush()
        with pytest.raises(CorruptSnapshotError):
            export_dcp(snapshot, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_is_in_the_way_stays(snapshot_path: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with open_snapshot(snapshot_path) as snapshot:
        with pytest.raises(UsageError, match="exists already"):
            export_dcp(snapshot, tmp_path / "out")
        with pytest.raises(EnvironmentUnusableError, match="No such file"):
            export_dcp(snapshot, tmp_path / "no" / "where")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
