"""Gangs of every kind of parallel training end as undisturbed ones, whatever happens to them (gang.py)."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk

from ..patience import PATIENCE_S
from .conftest import Finished, Workshop
from .warm.process import Servers

SCRIPT = Path(__file__).with_name("gang.py")
EPOCHS = "2"
#: No pattern that fits an epoch of the script; the last ones are in its uneven loaders and its evaluation.
SUSPENDS = "2,3,6,9,11,15,18,19,23,40,50"
ALL_ALIVE = ("0", "0")

pytestmark = [pytest.mark.slow, pytest.mark.gangs]


def digests(directory: Path) -> dict[str, dict[str, str]]:
    """Of every rank of every gang."""
    return {file.name: json.loads(file.read_text()) for file in directory.glob("digests.*")}


def run(
    workshop: Workshop, worlds: str, name: str, *flags: str, dies: tuple[str, str] = ALL_ALIVE
) -> Finished:
    """Train in a directory of that name; ``dies``: a rank, and the step after which it kills itself."""
    (workshop.directory / name).mkdir()
    words = (str(SCRIPT), str(workshop.directory / name), worlds, EPOCHS, *dies)
    return workshop.gpuslice_run(*flags, *words)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, servers: Servers) -> dict[str, dict[str, str]]:
    directory = tmp_path_factory.mktemp("undisturbed")
    workshop = Workshop(directory, directory / "ramdisk", servers)
    done = workshop.python(str(SCRIPT), str(directory), "2+4", EPOCHS, *ALL_ALIVE)
    assert done.returncode == 0, done.stderr
    found = digests(directory)
    assert len(found) == 6
    return found


def test_suspends_of_two_and_four_ranks_change_no_bit(
    quick_workshop: Workshop, undisturbed: dict[str, dict[str, str]]
) -> None:
    done = run(quick_workshop, "2+4", "out", "--suspend-at", SUSPENDS, "--report", "r.json")
    assert done.returncode == 0, done.stderr
    assert digests(quick_workshop.directory / "out") == undisturbed
    reports = [json.loads(file.read_text()) for file in quick_workshop.directory.glob("r*.json")]
    assert len(reports) == 4
    assert all(report["totals"]["switches"] >= 7 for report in reports)


def test_a_gang_of_four_goes_on_in_other_processes_when_it_leaves_and_when_a_rank_is_killed(
    quick_workshop: Workshop, undisturbed: dict[str, dict[str, str]]
) -> None:
    """The first leaves, the second is killed, the third ends."""
    ranks = 4
    leaves, dies = quick_workshop.directory / "leaves", quick_workshop.directory / "dies"
    with gang(quick_workshop, "first", ("all", "4"), leaves, ranks=ranks) as first:
        has_begun(quick_workshop, "first", ranks)
        leaves.touch()
        told = first.communicate(timeout=PATIENCE_S)[1]
    assert first.returncode == 0, told
    with gang(quick_workshop, "second", (str(ranks - 1), "5"), dies, ranks=ranks) as second:
        has_begun(quick_workshop, "second", ranks)
        dies.touch()
        told = second.communicate(timeout=PATIENCE_S)[1]
    was_killed(quick_workshop, "second", ranks - 1, second.returncode, told, ranks)
    with gang(quick_workshop, "third", ALL_ALIVE, leaves, ranks=ranks) as third:
        told = third.communicate(timeout=PATIENCE_S)[1]
    assert third.returncode == 0, told
    found = digests(quick_workshop.directory / "third")
    assert len(found) == ranks
    for name, of_rank in found.items():
        assert int(of_rank.pop("done")) <= int(undisturbed[name]["done"]) - 6, "it has begun anew"
        assert of_rank == {kind: value for kind, value in undisturbed[name].items() if kind != "done"}


@contextmanager
def gang(
    workshop: Workshop, name: str, dies: tuple[str, str], when: Path, *flags: str, ranks: int = 2
) -> Iterator[subprocess.Popen[str]]:
    """Who is to die or leave does so when there is that file."""
    (workshop.directory / name).mkdir()
    words = (str(SCRIPT), str(workshop.directory / name), str(ranks), EPOCHS, *dies)
    flags = ("--continue-anyway", "--checkpoint-every", "2", *flags)
    command = workshop.command("--job", "gang", *flags, *words)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with workshop.start(command, {"GANG_SLOW_UNTIL": str(when)}, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def was_killed(workshop: Workshop, name: str, rank: int, code: int, told: str, ranks: int = 2) -> None:
    """The gang has failed because of that rank; which rank's end it tells is a matter of chance."""
    assert code != 0
    assert (workshop.directory / name / f"killed.{ranks}.{rank}").exists(), told


def begins(workshop: Workshop, name: str) -> int:
    """With how many batches behind it a gang has begun, alike on both ranks."""
    (found,) = {file.read_text() for file in beginnings(workshop, name)}
    return int(found)


def has_checkpoint(workshop: Workshop) -> None:
    """Until both ranks have one of the same boundary."""
    disk = RamDisk(workshop.ramdisk)
    until(lambda: bool(disk.boundaries("gang", 0) & disk.boundaries("gang", 1)))


def has_begun(workshop: Workshop, name: str, ranks: int) -> None:
    """Until all ranks have the job and train."""
    until(lambda: all(file.exists() for file in beginnings(workshop, name, ranks)))


def beginnings(workshop: Workshop, name: str, ranks: int = 2) -> list[Path]:
    """What the ranks write as they begin: how many batches the gang has behind it."""
    return [workshop.directory / name / f"began.{ranks}.{rank}" for rank in range(ranks)]


def until(holds: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < ends_s
        time.sleep(0.02)
