"""``gpuslice run --no-verify`` and ``GPUSLICE_VERIFY``: damaged tensors arrive, other damage does not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import gpuslice
from gpuslice.checkpoint.named import process_rng
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.errors import CorruptSnapshotError

from ..checkpoint.harness import flip_a_bit
from ..checkpoint.named_state import save
from .conftest import Workshop

#: Damages what it suspends; then resumes, or leaves it to the next process.
SCRIPT = """
import sys
import torch, gpuslice

def whole():
    print(weight.tolist().count(1.0), "of", len(weight))

weight = torch.ones(5000)
job = gpuslice.attach(weight=weight)
whole()
if "look" in sys.argv:
    sys.exit()
snapshot = job.suspend()
content = snapshot.path.read_bytes()
at = content.index(bytes([0, 0, 128, 63] * 5000)) + 4 * 1234
with snapshot.path.open("r+b") as file:
    file.seek(at)
    file.write(bytes([1]))
if "leave" in sys.argv:
    sys.exit(7)
job.resume()
whole()
"""


@pytest.fixture
def workshop(warm_workshop: Workshop) -> Workshop:
    warm_workshop.write("train.py", SCRIPT)
    return warm_workshop


def test_the_option_reaches_resumes(workshop: Workshop) -> None:
    ours = workshop.gpuslice_run("--no-verify", "--report", "r.json", "train.py")
    assert (ours.returncode, ours.stdout) == (0, "5000 of 5000\n4999 of 5000\n"), ours.stderr
    (switch,) = json.loads((workshop.directory / "r.json").read_text())["switches"]
    assert switch["verified"] is False


def test_the_option_reaches_restarts(workshop: Workshop) -> None:
    left = workshop.gpuslice_run("--job", "k", "train.py", "leave")
    assert (left.returncode, left.stdout) == (7, "5000 of 5000\n"), left.stderr
    look = ("--continue-anyway", "train.py", "look")
    refused = workshop.gpuslice_run("--job", "k", *look)
    assert (refused.returncode, refused.stdout) == (4, "")
    # Which number it has is the collector's order, and that depends on the seed of `hash`.
    assert re.search(r"storage \d+ \(float32 \[5000\]\) is damaged", refused.stderr), refused.stderr
    trusting = workshop.gpuslice_run("--job", "k", "--no-verify", *look)
    assert (trusting.returncode, trusting.stdout) == (0, "4999 of 5000\n"), trusting.stderr


@pytest.mark.parametrize("part", ["preamble", "header", "payload", "metadata", "table", "record"])
def test_of_a_restore_only_the_payload_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setenv("GPUSLICE_VERIFY", "0")
    weight = torch.zeros(5)
    with RamDisk(tmp_path / "ramdisk").open_store("k") as store:
        snapshot = save(store, {"weight": torch.ones(5), "gpuslice.rng": process_rng.capture()})
        record = snapshot.record
        places = {"preamble": 9, "header": 200, "payload": snapshot.offsets[0]}
        places |= {"metadata": record.tail, "table": record.table, "record": record.position}
        flip_a_bit(snapshot.path, places[part])
        if part == "payload":
            gpuslice.restore(snapshot.path, weight=weight)
        else:
            with pytest.raises(CorruptSnapshotError):
                gpuslice.restore(snapshot.path, weight=weight)
    assert weight.tolist().count(1.0) == (4 if part == "payload" else 0)
