"""A parked job's snapshot is spilled, and the memory of a simulated GPU comes back from there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cudasim
import pytest
import torch

from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.room_requests import request_room
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import CorruptSnapshotError
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName

from ..checkpoint.harness import digest
from .test_away import TRAIN, Environ, run

MIB = 1 << 20
#: Before it resumes, all that lies in its store is spilled; the first byte of the state may be flipped.
SPILLED = (
    TRAIN
    + """
from pathlib import Path
from gpuslice.checkpoint.ramdisk.room_requests import request_room
from gpuslice.checkpoint.switch.switch import Switch
resume = Switch.resume
def resuming(switch, *arguments, **options):
    directory, snapshot = switch.snapshot.path.parent, switch.snapshot
    with switch._store.offering(snapshot):
        while request_room(directory):
            pass
    assert not list(directory.glob("*.gsnp"))
    (spilled,) = Path("spill").glob("*.gsnp")
    if "damaged" in sys.argv:
        with spilled.open("r+b") as file:
            file.seek(snapshot.offsets[0])
            byte = file.read(1)[0]
            file.seek(snapshot.offsets[0])
            file.write(bytes([byte ^ 1]))
    print("spilled", file=sys.stderr)
    return resume(switch, *arguments, **options)
Switch.resume = resuming
for x, y in DataLoader(data, batch_size=8):
    train(x, y)
print(digest())
"""
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "spill"


@pytest.fixture
def store(tmp_path: Path, place: Path) -> Iterator[JobStore]:
    with RamDisk(tmp_path / "ramdisk", 256 * MIB, spill_directory=place).open_store("a") as opened:
        yield opened


def spill(store: JobStore, switch: Switch, place: Path) -> Path:
    """Move the snapshot of a parked job; where it is now."""
    assert switch.snapshot is not None
    with store.offering(switch.snapshot):
        while request_room(store.directory):
            pass
    assert not list(store.directory.glob("*.gsnp"))
    (spilled,) = place.glob("*.gsnp")
    return spilled


def state() -> list[torch.Tensor]:
    """Several chunks and some more bytes; small ones, which are packed; a view; one of another type."""
    torch.cuda.manual_seed(3)
    large = torch.randn(2 * MIB + 5, device="cuda:0")
    small = [torch.randn(100 + number, device="cuda:0") for number in range(20)]
    return [large, large[7:], *small, torch.randint(0, 9, (MIB,), device="cuda:0")]


def test_device_memory_that_was_spilled_comes_back_bit_for_bit(store: JobStore, place: Path) -> None:
    tensors = state()
    switch = Switch(open_device(DeviceName("cuda", 0)), store)
    for boundary in range(1, 4):
        before = digest(*tensors)
        record = switch.suspend(boundary=boundary)
        assert record.bytes_freed > 16 * MIB
        spill(store, switch, place)
        others = torch.ones(record.bytes_freed, dtype=torch.uint8, device="cuda:0")
        del others  # whose bytes are what the state's memory has now
        switch.resume()
        assert digest(*tensors) == before
        tensors[0].add_(1)
    assert cudasim.used_bytes(0) > 16 * MIB


@pytest.mark.parametrize("part", ["large", "small"])
def test_a_wrong_byte_of_the_spilled_file_keeps_the_job_parked(
    store: JobStore, place: Path, part: str
) -> None:
    tensors = state()
    before = digest(*tensors)
    switch = Switch(open_device(DeviceName("cuda", 0)), store)
    switch.suspend(boundary=1)
    assert switch.snapshot is not None
    sizes = switch.snapshot.content.layout.sizes
    at = {
        "large": switch.snapshot.offsets[sizes.index(max(sizes))] + 5 * MIB,
        "small": switch.snapshot.offsets[sizes.index(min(sizes))],
    }[part]
    spilled = spill(store, switch, place)
    whole = spilled.read_bytes()
    spilled.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(CorruptSnapshotError, match=r"a\.r0\.A\.gsnp: storage \d+ .* is damaged"):
        switch.resume()
    assert switch.suspended
    spilled.write_bytes(whole)
    switch.resume()
    assert digest(*tensors) == before


def test_a_script_goes_on_from_what_was_spilled_or_ends_with_4(
    tmp_path: Path, script_environ: Environ
) -> None:
    words = ["-m", "gpuslice", "run", "--device", "cuda:0", "--spill-dir", "spill"]
    alone = run(SPILLED, tmp_path, script_environ, *words, "train.py")
    assert (alone.returncode, len(alone.stdout)) == (0, 65), alone.stderr
    done, damaged = (
        run(SPILLED, tmp_path, script_environ, *words, "--suspend-at", "4", "train.py", word)
        for word in ("whole", "damaged")
    )
    assert (done.returncode, done.stdout) == (0, alone.stdout), done.stderr
    assert "spilled" in done.stderr
    assert (damaged.returncode, damaged.stdout) == (4, ""), damaged.stderr
    assert "is damaged" in damaged.stderr
    assert "Traceback" not in damaged.stderr
