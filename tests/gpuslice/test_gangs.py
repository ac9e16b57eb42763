"""Gangs of every kind of parallel training end as undisturbed ones, whatever happens to them (gang.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Finished, Workshop
from .warm.process import Servers

SCRIPT = Path(__file__).with_name("gang.py")
EPOCHS = "2"
#: No pattern that fits an epoch of the script; the last ones are in its uneven loaders and its evaluation.
SUSPENDS = "2,3,6,9,11,15,18,19,23,40,50"
ALL_ALIVE = ("0", "0")

pytestmark = pytest.mark.slow


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
    workshop: Workshop, undisturbed: dict[str, dict[str, str]]
) -> None:
    done = run(workshop, "2+4", "out", "--suspend-at", SUSPENDS, "--report", "r.json")
    assert done.returncode == 0, done.stderr
    assert digests(workshop.directory / "out") == undisturbed
    reports = [json.loads(file.read_text()) for file in workshop.directory.glob("r*.json")]
    assert len(reports) == 4
    assert all(report["totals"]["switches"] >= 7 for report in reports)


def test_a_gang_of_which_any_rank_was_killed_goes_on_bit_for_bit(
    workshop: Workshop, undisturbed: dict[str, dict[str, str]]
) -> None:
    """From a checkpoint, and from what a suspend has left."""
    for name, snapshots, dies in (
        ("first", ("--checkpoint-every", "2"), ("1", "5")),
        ("second", ("--suspend-every", "2"), ("0", "4")),
    ):
        killed = run(workshop, "2", name, "--job", "gang", *snapshots, dies=dies)
        assert "SIGKILL" in killed.stderr
        assert not digests(workshop.directory / name)
    finished = run(workshop, "2", "third", "--job", "gang")
    assert finished.returncode == 0, finished.stderr
    found = digests(workshop.directory / "third")
    assert len(found) == 2
    for name, of_rank in found.items():
        # It has not begun anew.
        assert int(of_rank.pop("done")) < int(undisturbed[name]["done"]) - 4
        assert of_rank == {kind: value for kind, value in undisturbed[name].items() if kind != "done"}
