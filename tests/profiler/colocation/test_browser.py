"""The page in a real browser shows the figures of the JSON. `tests/test_pages.py` looks at its layout.

Without Chromium these are skipped; `test_result.py` compares page and JSON without one.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpuslice.profiler.colocation.page import page
from gpuslice.profiler.colocation.result import Result

from ...browser import needs_browser, probe
from .test_result import experiment

SCRIPT = """
return {
  cells: [...document.querySelectorAll('[data-normalized]')].map(one => Number(one.dataset.normalized)),
  shades: [...document.querySelectorAll('[data-normalized]')].map(
    one => getComputedStyle(one).backgroundColor),
  tables: Object.fromEntries([...document.querySelectorAll('h2')].map(one => [one.textContent,
    [...one.parentElement.querySelectorAll('table')].find(
      table => one.compareDocumentPosition(table) & Node.DOCUMENT_POSITION_FOLLOWING)])
    .filter(([, table]) => table)
    .map(([title, table]) => [title,
      [...table.tBodies[0].rows].map(row => [...row.cells].map(cell => cell.innerText))])),
  drawn: [...document.querySelectorAll('svg.plot')].filter(
    one => one.getBoundingClientRect().width > 0).length,
};
"""

pytestmark = needs_browser


@pytest.fixture(scope="module")
def result() -> Result:
    return experiment(stress=True)


@pytest.fixture(scope="module")
def shown(result: Result, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found, console = probe(page(result), SCRIPT, tmp_path_factory.mktemp("browser"))
    assert console == []
    assert isinstance(found, dict)
    return found


def test_all_is_drawn(result: Result, shown: dict[str, Any]) -> None:
    assert shown["drawn"] == 2 + len(result.names) + 1, "loads, step times and the timeline"
    assert len(set(shown["shades"])) == len({round(value, 3) for value in shown["cells"]})


def test_what_is_shown_is_what_the_json_says(result: Result, shown: dict[str, Any]) -> None:
    truth = msgspec.json.decode(msgspec.json.encode(result))
    tables = shown["tables"]
    assert shown["cells"] == [value for row in truth["matrix"] for value in row if value is not None]
    sets = [
        [" + ".join(one["members"]), one["verdict"], f"{one['gain']:.3f}", f"{one['total']:.3f}"]
        for one in truth["sets"]
        if one["mode"] == "packed"
    ]
    assert [[row[at] for at in (0, 1, 2, 4)] for row in tables["Sets"]] == sets
    jobs = [[job["name"], f"{job['steps_per_second']:.4g}"] for job in truth["jobs"]]
    assert [row[:2] for row in tables["Jobs alone"]] == jobs
    curves = [
        [one["job"], one["kind"], f"{one['pressure']:.3f}", *(f"{value:.3f}" for value in one["normalized"])]
        for one in truth["stress"]
    ]
    assert tables["Throughput under our own loads"] == curves
    off = truth["prediction_error"]
    (row,) = tables["Error of the predictions"]
    assert row == [
        str(off["pairs"]),
        *(f"{off[key]:.3f}" for key in ("mean_absolute", "greatest", "mean_absolute_of_mean")),
    ]
