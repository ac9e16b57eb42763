"""The page of ``gpuslice sim --html``: well-formed, offline, bounded, and drawn by a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gpuslice.daemon import simulation_page
from gpuslice.daemon.simulation_page import page
from gpuslice.sched_core.sim.outcome import Outcome
from gpuslice.sched_core.sim.run import Request, run_one
from gpuslice.sched_core.traces.synth import SynthSpec, synthesize
from gpuslice.sched_core.traces.trace import Trace

from ...patience import PATIENCE_S
from ...profiler.test_page import read

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@cache
def outcomes(jobs: int, cluster: str, **extras: Any) -> tuple[Outcome, ...]:
    trace = synthesize(SynthSpec(jobs, 0.9, 16))
    columns = {key: [value] * jobs for key, value in extras.items()}
    trace = Trace(trace.ids, trace.submit_s, trace.demand, trace.duration_s, columns, name="<made> & up")
    return tuple(
        run_one(Request(trace, cluster, policy, keep_spans=True)) for policy in ("fifo", "srtf", "rr")
    )


def test_the_page_is_well_formed_and_shows_every_policy() -> None:
    reader = read(page(outcomes(60, "2x8")))
    assert any("fifo, srtf, rr on <made> & up: 60 jobs" in text for text in reader.text)
    drawn = [attributes.get("data-of") for tag, attributes in reader.tags if tag == "polyline"]
    assert drawn == ["0", "1", "2"] * 3
    labels = [attributes.get("aria-label") for tag, attributes in reader.tags if tag == "svg"]
    assert [label for label in labels if label in ("fifo", "srtf", "rr")] == ["fifo", "srtf", "rr"]
    titles = [text for text in reader.text if re.match(r"job \d+: \d+ devices for", text)]
    assert len(titles) > 60


def test_the_headline_names_the_best_and_the_worst_policy() -> None:
    first, *_ = found = outcomes(60, "2x8")
    assert re.fullmatch(
        r"srtf completes jobs soonest of 3 policies: .+ on average; \w+ latest: .+",
        simulation_page.headline(found),
    )
    assert re.fullmatch(r"fifo completes a job in .+ on average", simulation_page.headline([first]))
    nothing = Outcome.empty(first.trace, "2x8", 16, "las")
    assert simulation_page.headline([nothing]) == "No job has ended under las"


def test_it_needs_no_network() -> None:
    assert not re.search(r"https?:|//|src=|url\(|<link|@import", page(outcomes(60, "2x8")))


def test_the_best_of_each_column_is_marked() -> None:
    document = page(outcomes(60, "2x8"))
    rows = re.findall(r"<tr>(<td>(?:fifo|srtf|rr)</td>.*?)</tr>", document)
    mean_jct = {row[4:8].strip("</"): re.findall(r'<td(?: class="(\w+)")?>', row)[2] for row in rows}
    assert mean_jct["srtf"] == "good"
    assert mean_jct["fifo"] == ""


def test_deadlines_are_a_column_where_there_are_some() -> None:
    assert "deadlines missed" not in page(outcomes(60, "2x8"))
    assert "deadlines missed" in page(outcomes(60, "2x8", deadlines=((60.0, 1.0),)))


def test_pictures_become_coarser_rather_than_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = len(page(outcomes(1000, "8x8")))
    assert fine < 1_000_000
    monkeypatch.setattr(simulation_page, "_PICTURES_BYTES", 180_000)
    coarse = page(outcomes(1000, "8x8"))
    pictures = re.findall(r'<figure class="gantt">.*?</figure>', coarse, re.DOTALL)
    assert sum(map(len, pictures)) <= 180_000 < fine


def test_an_interrupted_run_says_so() -> None:
    (found, *_) = outcomes(60, "2x8")
    partial = Outcome.empty(found.trace, found.cluster, found.devices, "fifo")
    partial.complete = False
    assert "interrupted" in "".join(read(page([partial])).text)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_draws_it_and_its_key_works(tmp_path: Path) -> None:
    """The page's own script runs, and a probe reports the boxes that the browser gave to the marks."""
    probe = """<script>
    document.querySelector('button[data-of="1"]').click();
    const seen = (query) => [...document.querySelectorAll(query)].filter(
        (mark) => mark.getBoundingClientRect().width > 0 && mark.getBoundingClientRect().height > 0).length;
    document.body.dataset.found = [seen('.line[data-of="0"]'), seen('.line[data-of="1"]'),
        seen('.gantt svg'), seen('td.good') > 0, seen('path.job') > 60].join();
    </script>"""
    path = tmp_path / "page.html"
    path.write_text(page(outcomes(60, "2x8")).replace("</body>", probe + "</body>"), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-sync", "--disable-background-networking", "--disable-component-update", "--dump-dom"]
    done = subprocess.run(
        [str(CHROMIUM), *flags, f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert 'data-found="3,0,3,true,true"' in done.stdout, done.stderr
