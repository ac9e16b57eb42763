"""The limit of what a job may allocate: an allocation beyond it fails where it is made, by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from resource import RLIM_INFINITY
from unittest.mock import Mock

import pytest

from gpuslice.limits import memory_limit
from gpuslice.limits.memory_limit import MemoryLimit, asked_bytes
from gpuslice.types import DeviceName

from ...patience import PATIENCE_S

MIB = 1 << 20
CATCHES = """
import torch
from torch.utils.data import DataLoader
kept = torch.ones(40 << 18)
for boundary, batch in enumerate(DataLoader(range(4))):
    try:
        torch.ones(400 << 18)
    except RuntimeError as error:
        print("refused", boundary, "you tried to allocate 419430400 bytes" in str(error))
    torch.ones(30 << 18)
print(kept.sum().item())
"""
#: One worker takes most of the limit and waits until that is refused to the other one.
WORKERS = """
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

TAKEN, REFUSED = Path("taken"), Path("refused")

class Data(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index == 0:
            kept = torch.empty(300 << 20, dtype=torch.uint8)
            TAKEN.touch()
            while not REFUSED.exists():
                time.sleep(0.01)
            return len(kept)
        while not TAKEN.exists():
            time.sleep(0.01)
        while True:
            try:
                torch.empty(300 << 20, dtype=torch.uint8)
            except RuntimeError as error:
                REFUSED.write_text(str(error).splitlines()[-1])
                return 0

if __name__ == "__main__":
    print([batch.item() for batch in DataLoader(Data(), num_workers=2, multiprocessing_context=sys.argv[1])])
    while True:  # until the workers have ended, and their room is found to be free
        try:
            torch.empty(300 << 20, dtype=torch.uint8)
            break
        except RuntimeError:
            time.sleep(0.01)
"""
GOES_BEYOND = "import torch; kept = torch.ones(40 << 18); more = torch.empty(400 << 18)"


def run(
    directory: Path, script: str, *options: str, limit: str = "100MiB", word: str = ""
) -> subprocess.CompletedProcess[str]:
    (directory / "script.py").write_text(script, encoding="utf-8")
    words = ["run", "--device", "cpu", "--memory", limit, *options, "script.py", word]
    command = [sys.executable, "-m", "gpuslice", *words]
    return subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes. Error",
            1 << 32,
        ),
        ("CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0 has", 41 * MIB // 2),
        ("Unable to allocate 8.00 GiB for an array with shape (1073741824,)", 8 << 30),
        ("", 0),
    ],
)
def test_what_was_asked_for_is_read_from_the_error(text: str, nbytes: int) -> None:
    assert asked_bytes(text) == nbytes


def test_a_script_that_asks_for_too_much_hears_of_it_at_the_allocation_and_may_go_on(tmp_path: Path) -> None:
    done = run(tmp_path, CATCHES, "--suspend-every", "1", "--ramdisk-dir", str(tmp_path / "ramdisk"))
    refused = "".join(f"refused {boundary} True\n" for boundary in range(4))
    assert (done.returncode, done.stdout) == (0, f"{refused}{40 << 18}.0\n"), done.stderr


def test_the_error_that_ends_it_names_gpuslice_the_limit_and_the_wish(tmp_path: Path) -> None:
    done = run(tmp_path, GOES_BEYOND)
    assert done.returncode == 1
    what, last = done.stderr.splitlines()[-2:]
    assert "you tried to allocate 419430400 bytes" in what
    said, had = last.split(" and had ")
    assert said == "gpuslice: out of memory: the job's memory limit of 100.00 MiB: it asked for 400.00 MiB"
    assert 40 <= float(had.removesuffix(" MiB (submit --memory)")) <= 100, "without the room for stacks"


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_what_a_worker_has_taken_another_one_cannot_take(tmp_path: Path, start: str) -> None:
    done = run(tmp_path, WORKERS, limit="400MiB", word=start)
    assert (done.returncode, done.stdout) == (0, f"[{300 * MIB}, 0]\n"), done.stderr
    refused = (tmp_path / "refused").read_text(encoding="utf-8")
    assert "can't allocate memory: you tried to allocate 314572800 bytes" in refused


def test_a_job_that_moves_before_its_script_begins_cuda_does_not_begin_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    due: list[Callable[[], None]] = []
    monkeypatch.setattr(memory_limit, "_at_cuda_begin", due.append)
    limit = MemoryLimit("1G", print)
    limit.begin(DeviceName("cuda", 0))
    limit.restore(DeviceName("cuda", 1))
    assert len(due) == 2


class Kernel:
    """Limits and memory of this process, as the limit sees them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int]) -> None:
        self.limits, self.has_bytes = limits, 100 * MIB
        monkeypatch.setattr("resource.getrlimit", lambda which: self.limits)
        monkeypatch.setattr("resource.setrlimit", self._set)
        monkeypatch.setattr(memory_limit, "private_bytes", lambda pid: self.has_bytes)
        monkeypatch.setattr(memory_limit, "Watch", lambda share: Mock())
        monkeypatch.setattr("gpuslice.limits.worker_memory._below", lambda pid: [])

    def _set(self, which: int, limits: tuple[int, int]) -> None:
        if limits[1] != RLIM_INFINITY and not 0 <= limits[0] <= limits[1]:
            raise ValueError("current limit exceeds maximum limit")
        self.limits = limits


@pytest.mark.parametrize("soft", [150 * MIB, 200 * MIB])
def test_what_gpuslice_takes_raises_it_no_higher_than_it_was_and_could_be(
    monkeypatch: pytest.MonkeyPatch, soft: int
) -> None:
    kernel = Kernel(monkeypatch, (soft, 200 * MIB))
    limit, cpu = MemoryLimit("1G", print), DeviceName("cpu", None)
    limit.begin(cpu)
    for _ in range(2):
        with limit.lifted():
            kernel.has_bytes += 20 * MIB
        limit.restore(cpu)
        assert kernel.limits == (soft, 200 * MIB)


def test_a_hard_limit_that_the_script_lowers_later_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, (RLIM_INFINITY, RLIM_INFINITY))
    limit, cpu = MemoryLimit("1G", print), DeviceName("cpu", None)
    limit.begin(cpu)
    kernel.limits = (200 * MIB, 200 * MIB)
    with limit.lifted():
        assert kernel.limits == (200 * MIB, 200 * MIB)
    limit.restore(cpu)
    assert kernel.limits == (200 * MIB, 200 * MIB)


def test_a_limit_needs_a_device(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpuslice", "run", "--memory", "1G", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, "name it: --device cpu" in done.stderr) == (2, True)
