"""Launchers that start their ranks themselves and tell them less than torchrun does: all ranks park."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Workshop
from .warm.process import Servers

SCRIPT = Path(__file__).with_name("launched.py")


def digests(directory: Path, ranks: int = 2) -> list[str]:
    return [(directory / f"digest.{rank}").read_text() for rank in range(ranks)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, servers: Servers) -> list[str]:
    directory = tmp_path_factory.mktemp("undisturbed")
    workshop = Workshop(directory, directory / "ramdisk", servers)
    done = workshop.python(str(SCRIPT), "fork", str(directory), "1")
    assert done.returncode == 0, done.stderr
    return digests(directory)


@pytest.mark.slow
@pytest.mark.gangs
@pytest.mark.parametrize("how", ["spawn", pytest.param("fork", marks=pytest.mark.repeats)])
def test_every_rank_parks_at_its_boundaries(
    quick_workshop: Workshop, undisturbed: list[str], how: str
) -> None:
    flags = ("--suspend-every", "2", "--report", "r.json", "--job", "gang")
    done = quick_workshop.gpuslice_run(*flags, str(SCRIPT), how, str(quick_workshop.directory), "1")
    assert done.returncode == 0, done.stderr
    assert digests(quick_workshop.directory) == undisturbed
    for rank, name in enumerate(["r.json", "r.rank1.json"]):
        report = json.loads((quick_workshop.directory / name).read_text())
        assert report["rank"] == rank
        assert [switch["boundary"] for switch in report["switches"]] == [2, 4, 6], (name, done.stderr)
        assert report["totals"]["steps"] == 6
    assert not list(quick_workshop.ramdisk.glob("gang.r*"))  # all have ended well
