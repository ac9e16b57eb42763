"""benchmarks/gpu_suite from end to end over the simulated runtime, with small sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ..benchmarks.test_gpu_suite import BARE, SUITE
from ..gpuslice.conftest import Workshop

STEPS = [
    "environment",
    "self-test",
    "copies_4gb",
    "threshold",
    "copies_16gb",
    "swap",
    "rival to-cpu",
    "rival torch-save",
    "rival memory-saver",
    "rival memory-saver-retained",
    "tests",
    "repros",
    "trainings",
    "tests_alone",
    "rival driver",
]
KINDS = ["large", "frozen", "small"]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def result(path: Path) -> Any:
    """What a step measured, which must say that it was simulated, and give no time."""
    found = read(path)
    assert found["simulated"] is True
    assert not [key for key in keys(found) if key.endswith(("_s", "_of_peak"))]
    return found["result"]


def keys(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(key for item in value.values() for key in keys(item))]
    return [key for item in value for key in keys(item)] if isinstance(value, list) else []


@pytest.mark.slow
def test_every_step_runs_in_its_order_and_passes(workshop: Workshop) -> None:
    out = workshop.directory / "results"
    workshop.write("bare/sitecustomize.py", BARE)
    workshop.environ |= {"PYTHONPATH": str(workshop.directory / "bare"), "CUDASIM_DEVICES": "2"}
    words = ("--out", str(out), "--scale", "0.001", "--limit", "2700")
    with workshop.start([sys.executable, str(SUITE / "run.py"), *words]) as process:
        code = process.wait(2800)
    summary = read(out / "summary.json")
    assert [step["name"] for step in summary["steps"]] == STEPS
    assert [step["name"] for step in summary["steps"] if step["exit_code"] != 0] == []
    assert code == 0
    assert summary["simulated"] is True
    sizes = (("copies_4gb", 4_000_000, KINDS), ("copies_16gb", 16_000_000, KINDS[:1]))
    for name, nbytes, kinds in sizes:
        copies = result(out / f"{name}.json")
        assert copies["finished"]
        assert [row["kind"] for row in copies["switches"]] == kinds
        assert all(row["bytes"] <= nbytes for row in copies["switches"])
    assert [row["room"] for row in result(out / "swap.json")["swaps"]] == ["for both", "for one"]
    rows = result(out / "threshold.json")["rows"]
    assert {row["way"] for row in rows} == {"packed", "direct"}
    repros = result(out / "repros.json")
    assert len(repros["wrong"]) >= 9
    assert not any(repros["wrong"].values())
    assert "skipped" not in result(out / "rival_driver.json")
    assert "passed" in (out / "tests_alone.log").read_text()
    assert "passed" in (out / "tests.log").read_text()


@pytest.mark.slow
def test_what_finds_no_room_is_left_out(workshop: Workshop) -> None:
    """Sizes of a real GPU do not fit into a simulated one of 256 MiB."""
    workshop.environ |= {"CUDASIM_MEMORY_MIB": "256"}
    for module, words in (("copy_phase", ("--bytes", str(10**9))), ("threshold", ("--count", "500"))):
        out = workshop.directory / f"{module}.json"
        command = [sys.executable, "-m", f"benchmarks.gpu_suite.{module}", "--out", str(out), *words]
        with workshop.start(["sh", "-c", 'cd "$0" && exec "$@"', str(tree(workshop)), *command]) as process:
            assert process.wait(200) == 0
    assert result(workshop.directory / "copy_phase.json")["skipped"] == "too little memory is free"
    rows = result(workshop.directory / "threshold.json")["rows"]
    assert "too little memory" in rows[-1]["skipped"]
    assert "skipped" not in rows[0]


def tree(workshop: Workshop) -> Path:
    """The checkout as steps see it."""
    directory = workshop.directory / "tree"
    if not directory.exists():
        code = "import steps, sys; from pathlib import Path; steps.link_tree(Path(sys.argv[1]))"
        with workshop.start(
            ["sh", "-c", 'cd "$0" && exec "$@"', str(SUITE), sys.executable, "-c", code, str(directory)]
        ) as process:
            assert process.wait(60) == 0
    return directory
