"""The pages that gpuslice writes, as a browser lays them out in narrow and wide windows."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuslice.cli import simulation_page
from gpuslice.demo import report
from gpuslice.demo.recorder import Recorder
from gpuslice.profiler import profile
from gpuslice.profiler.colocation.page import page as colocation_page
from gpuslice.profiler.colocation.result import Result

from .browser import layouts, needs_browser
from .demo.test_main import job
from .demo.test_recorder import tell
from .gpuslice.cli.test_simulation_page import outcomes
from .profiler.colocation.test_result import experiment
from .profiler.test_profile import DEVICES, recording

WIDTHS = (500, 1000, 1600)
PAGES = ("colocation", "demo", "demo that failed", "interrupted", "profile", "simulation")
#: The column that says what came out.
VERDICTS = {"colocation": "verdict", "demo": "equal", "demo that failed": "equal", "interrupted": "verdict"}
#: The name of a script with options, as people have them.
LONG = b"train_language_model.py --batch 64"
Layouts = tuple[dict[tuple[str, int], dict[str, Any]], list[str]]


def demonstration(directory: Path, *, equal: bool) -> str:
    recorder = Recorder(0.0)
    tell(recorder)
    jobs = [job("a"), job("b", equal=equal, digest="d" * 64 if equal else "e" * 64)]
    about = {"device": "cpu:0", "quantum_s": 2.0, "wall_s": 4.0}
    found = report.result(recorder, jobs, about, directory)
    report.write(found, recorder)
    return Path(found.page).read_text(encoding="utf-8")


def renamed(result: Result) -> Result:
    return msgspec.json.decode(msgspec.json.encode(result).replace(b"burn.py", LONG), type=Result)


@cache
def pages(directory: Path) -> dict[str, str]:
    intervals = recording(3000)
    return {
        "colocation": colocation_page(renamed(experiment(stress=True))),
        "demo": demonstration(directory, equal=True),
        "demo that failed": demonstration(directory, equal=False),
        "interrupted": colocation_page(experiment(last=4)),
        "profile": profile.page(LONG.decode(), profile.make_profile(intervals, DEVICES), intervals),
        "simulation": simulation_page.page(outcomes(60, "2x8", deadlines=((60.0, 1.0),))),
    }


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Layouts:
    return layouts(pages(tmp_path_factory.mktemp("report")), WIDTHS, tmp_path_factory.mktemp("browser"))


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_cut_off_and_nothing_overlaps(name: str, width: int, drawn: Layouts) -> None:
    found = drawn[0][name, width]
    assert found["cut"] == []
    assert found["overlapping"] == []
    assert found["sideways"] == 0


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_letters_can_be_read(name: str, width: int, drawn: Layouts) -> None:
    assert drawn[0][name, width]["smallest"] >= 12


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("name", "column"), VERDICTS.items())
def test_the_verdict_is_seen_without_scrolling(name: str, column: str, width: int, drawn: Layouts) -> None:
    assert drawn[0][name, width]["columns"][column]


@needs_browser
def test_no_page_has_an_error(drawn: Layouts) -> None:
    assert drawn[1] == []


@needs_browser
def test_the_browser_would_tell(tmp_path: Path) -> None:
    broken = (
        '<!doctype html><html><body style="margin:0">'
        '<p style="width:2em;overflow:hidden;white-space:nowrap">cut off here</p>'
        '<p style="width:3000px">wide <span style="margin-left:2900px">text</span></p>'
        '<svg class="plot" width="90" height="20"><text x="5" y="15">one</text><text x="8" y="15">two</text>'
        '<text x="60" y="15" style="font-size:6px">tiny</text></svg>'
        "<table><tr><th>verdict</th></tr></table><script>undefined_function()</script></body></html>"
    )
    found, console = layouts({"broken": broken}, [500], tmp_path)
    (seen,) = found.values()
    assert {"wide text", "cut off here"} <= set(seen["cut"])
    assert ["one", "two"] in seen["overlapping"]
    assert seen["sideways"] > 0
    assert seen["smallest"] == 6
    assert seen["columns"] == {"verdict": True}
    assert len(console) == 1
    assert "undefined_function" in console[0]
