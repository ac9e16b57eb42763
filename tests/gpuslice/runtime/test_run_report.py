"""The report: documented keys, whole at any time, one file per rank."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gpuslice.checkpoint.switch.record import SwitchRecord
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.launch.command import rank_path
from gpuslice.runtime.run_report import Report

PAGE = Path(__file__).resolve().parents[3] / "docs" / "json.md"
#: Keys that are promised to stay.
PROMISED = {
    *("boundary", "route", "bytes_found", "bytes_copied", "bytes_freed"),
    *("quiesce_s", "copy_out_s", "publish_s", "free_s", "parked_s", "reserve_s", "copy_in_s"),
    *("gb_per_s_out", "gb_per_s_in", "rss_before_bytes", "rss_parked_bytes", "rss_after_bytes"),
}


def record() -> SwitchRecord:
    return SwitchRecord(boundary=3, bytes_copied=1_000_000, copy_out_s=0.002, copy_in_s=0.001, parked_s=9.0)


def test_the_file_is_there_before_the_first_switch(tmp_path: Path) -> None:
    Report(tmp_path / "r.json", job="a")
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["switches"] == []
    assert document["totals"]["switches"] == 0


def test_switches_and_totals(tmp_path: Path) -> None:
    report = Report(tmp_path / "r.json", rank=1)
    report.add(record())
    report.checkpointed(500, 0.25)
    report.checkpointed(500, 0.5)
    report.write(boundaries=10, steps=8)
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["rank"] == 1
    assert document["switches"][0]["gb_per_s_out"] == pytest.approx(0.5)
    assert document["totals"] == {
        "boundaries": 10,
        "steps": 8,
        "switches": 1,
        "bytes_copied": 1_000_000,
        "blackout_s": pytest.approx(0.003),  # parked_s is not the switch's doing
        "blackout_mean_s": pytest.approx(0.003),
        "blackout_max_s": pytest.approx(0.003),
        "cold": 0,
        "blackout_cold_s": 0.0,
        "checkpoints": 2,
        "checkpoint_bytes": 1000,
        "checkpoint_blocked_s": 0.75,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_cold_switches_are_counted_apart() -> None:
    report = Report(None)
    report.add(record())
    cold = record()
    cold.cold, cold.admit_s = True, 0.5
    report.add(cold)
    totals = report.totals(boundaries=1, steps=1)
    assert (totals["switches"], totals["cold"]) == (2, 1)
    assert totals["blackout_cold_s"] == pytest.approx(0.503)


def test_every_key_is_documented_and_the_promised_ones_are_there(tmp_path: Path) -> None:
    report = Report(tmp_path / "r.json")
    report.add(record())
    report.write(boundaries=1, steps=1)
    document = json.loads((tmp_path / "r.json").read_text())
    keys = {*document, *document["switches"][0], *document["totals"], *document["versions"]}
    assert set(document["switches"][0]) >= PROMISED
    assert keys <= set(re.findall(r"`(\w+)`", PAGE.read_text(encoding="utf-8")))


@pytest.mark.parametrize(("rank", "name"), [(0, "r.json"), (1, "r.rank1.json"), (12, "r.rank12.json")])
def test_each_rank_has_its_file(rank: int, name: str) -> None:
    assert rank_path(Path("out/r.json"), rank) == Path("out") / name


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnusableError, match="nowhere"):
        Report(tmp_path / "nowhere" / "r.json")


def test_the_summary_is_one_line() -> None:
    report = Report(None)
    assert report.summary(boundaries=7, steps=7) == "no switch at 7 boundaries, 7 optimizer steps"
    report.add(record())
    line = report.summary(boundaries=7, steps=7)
    assert line == "1 switch at 7 boundaries, 976.56 KiB copied and 3.0 ms of blackout each on average"


def test_a_file_that_another_process_writes_now_is_left_to_it(tmp_path: Path) -> None:
    """A launcher's own report gives way to that of the rank which it has started."""
    path = tmp_path / "r.json"
    launcher = Report(path, launch="1")
    rank = Report(path, launch="1")
    rank.write(boundaries=3, steps=3)
    launcher.write(boundaries=0, steps=0)
    assert json.loads(path.read_text())["totals"]["boundaries"] == 3
    rank.write(boundaries=4, steps=4)
    assert json.loads(path.read_text())["totals"]["boundaries"] == 4


def of_another_process(monkeypatch: pytest.MonkeyPatch, path: Path, pid: int, launch: str = "1") -> Report:
    monkeypatch.setattr("os.getpid", lambda: pid)
    return Report(path, launch=launch)


def test_trainings_of_one_command_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    for pid, switches in ((1, 2), (2, 0), (3, 1)):  # the second one trains nothing
        report = of_another_process(monkeypatch, path, pid)
        for _ in range(switches):
            report.add(record())
            report.write(boundaries=10 * pid, steps=pid)
    document = json.loads(path.read_text())
    assert [one["process"] for one in document["trainings"]] == [1, 3]
    assert [one["totals"]["switches"] for one in document["trainings"]] == [2, 1]
    assert len(document["switches"]) == 3
    totals = document["totals"]
    assert (totals["boundaries"], totals["steps"], totals["switches"]) == (40, 4, 3)
    assert totals["blackout_mean_s"] == pytest.approx(0.003)
    assert totals["blackout_max_s"] == pytest.approx(0.003)


def test_trainings_at_the_same_time_keep_what_the_others_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    reports = {pid: of_another_process(monkeypatch, path, pid) for pid in (1, 2)}
    for boundaries in (5, 6):
        for pid, report in reports.items():
            monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
            report.write(boundaries=boundaries, steps=boundaries)
    document = json.loads(path.read_text())
    assert {one["process"]: one["totals"]["steps"] for one in document["trainings"]} == {1: 6, 2: 6}


@pytest.mark.parametrize("found", ["{}", "no JSON", '{"launch": "2", "trainings": [], "switches": []}'])
def test_what_another_launch_has_left_is_replaced(tmp_path: Path, found: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(found)
    Report(path, launch="1").write(boundaries=1, steps=1)
    assert len(json.loads(path.read_text())["trainings"]) == 1
