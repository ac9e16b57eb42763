"""The page in a real browser: no console error, no text that is cut, and the figures of the JSON.

Without Chromium these are skipped; `test_result.py` compares page and JSON without one.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuslice.profiler.colocation.page import page
from gpuslice.profiler.colocation.result import Result

from ...patience import PATIENCE_S
from .test_result import experiment

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), "")
WIDTH = 1280

#: Looks at the page as it is laid out, and leaves what it found in the document.
PROBE = """
const outside = (inner, outer) => inner.left < outer.left - 1 || inner.right > outer.right + 1
  || inner.top < outer.top - 1 || inner.bottom > outer.bottom + 1;
const cut = [];
for (const text of document.querySelectorAll('svg text'))
  if (outside(text.getBoundingClientRect(), text.ownerSVGElement.getBoundingClientRect()))
    cut.push(text.textContent);
for (const one of document.querySelectorAll('h1, h2, h3, p, li, th, td'))
  if (one.scrollWidth > one.clientWidth + 1 || one.scrollHeight > one.clientHeight + 1)
    cut.push(one.textContent);
for (const one of document.querySelectorAll('.scroll'))
  if (one.scrollWidth > one.clientWidth + 1) cut.push(one.textContent);
const seen = {
  cut,
  sideways: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  cells: [...document.querySelectorAll('[data-normalized]')].map(one => Number(one.dataset.normalized)),
  tables: Object.fromEntries([...document.querySelectorAll('table')].map(table => [
    table.closest('.scroll').previousElementSibling.textContent,
    [...table.tBodies[0].rows].map(row => [...row.cells].map(cell => cell.innerText))])),
  drawn: [...document.querySelectorAll('svg')].filter(one => one.getBoundingClientRect().width > 0).length,
};
const note = document.createElement('pre');
note.id = 'seen';
note.textContent = JSON.stringify(seen);
document.body.append(note);
"""

pytestmark = pytest.mark.skipif(not BROWSER, reason=f"none of {', '.join(BROWSERS)} is installed")


def seen(text: str, directory: Path) -> tuple[dict[str, Any], list[str]]:
    """What the browser makes of a page, and what it wrote to its console."""
    path = directory / "page.html"
    path.write_text(text.replace("</body>", f"<script>{PROBE}</script></body>"), encoding="utf-8")
    found = subprocess.run(
        [
            BROWSER,
            *(
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--dump-dom",
                "--enable-logging=stderr",
                "--v=0",
            ),
            *(f"--window-size={WIDTH},2000", f"--user-data-dir={directory / 'profile'}", path.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    match = re.search(r'<pre id="seen">(.*?)</pre>', found.stdout, re.DOTALL)
    console = [line for line in found.stderr.splitlines() if "CONSOLE" in line]
    return (json.loads(unescape(match[1])) if match else {}), console


@pytest.fixture(scope="module")
def result() -> Result:
    return experiment(stress=True)


@pytest.fixture(scope="module")
def shown(result: Result, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str]]:
    return seen(page(result), tmp_path_factory.mktemp("browser"))


def test_it_opens_without_an_error_and_no_text_is_cut(shown: tuple[dict[str, Any], list[str]]) -> None:
    found, console = shown
    assert console == []
    assert found["cut"] == []
    assert found["sideways"] == 0
    assert found["drawn"] >= 8


def test_what_is_shown_is_what_the_json_says(result: Result, shown: tuple[dict[str, Any], list[str]]) -> None:
    found, _ = shown
    truth = msgspec.json.decode(msgspec.json.encode(result))
    assert found["cells"] == [value for row in truth["matrix"] for value in row if value is not None]
    sets = [
        [name, " + ".join(one["members"]), one["mode"], f"{value:.6g}", f"{one['total']:.6g}", one["verdict"]]
        for one in truth["sets"]
        for name, value in zip(one["members"], one["normalized"], strict=True)
    ]
    assert [[row[at] for at in (0, 1, 2, 3, 5, 8)] for row in found["tables"]["Sets"]] == sets
    jobs = [[job["name"], f"{job['steps_per_second']:.6g}"] for job in truth["jobs"]]
    assert [row[:2] for row in found["tables"]["Jobs alone"]] == jobs
    curves = [
        [one["job"], one["kind"], f"{one['pressure']:.6g}", *(f"{value:.6g}" for value in one["normalized"])]
        for one in truth["stress"]
    ]
    assert found["tables"]["Throughput under our own loads"] == curves
    off = truth["prediction_error"]
    (row,) = found["tables"]["Error of the predictions"]
    assert row == [
        str(off["pairs"]),
        *(f"{off[key]:.6g}" for key in ("mean_absolute", "greatest", "mean_absolute_of_mean")),
    ]


def test_the_browser_would_tell(tmp_path: Path) -> None:
    broken = (
        '<!doctype html><html><body><p style="width:2em;overflow:hidden;white-space:nowrap">cut off here</p>'
        '<svg width="10" height="10" viewBox="0 0 10 10"><text x="5" y="5">outside</text></svg>'
        "<script>undefined_function()</script></body></html>"
    )
    found, console = seen(broken, tmp_path)
    assert set(found["cut"]) == {"cut off here", "outside"}
    assert len(console) == 1
    assert "undefined_function" in console[0]
