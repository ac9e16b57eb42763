"""The page of ``gpuslice sim --html``: well-formed, offline, bounded, and drawn by a real browser."""

from __future__ import annotations

import re
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gpuslice.cli import simulation_page
from gpuslice.cli.simulation_page import page
from gpuslice.sched_core.sim.outcome import Outcome
from gpuslice.sched_core.sim.run import Request, run_one
from gpuslice.sched_core.traces.synth import SynthSpec, synthesize
from gpuslice.sched_core.traces.trace import Trace

from ...browser import needs_browser, probe
from ...profiler.test_page import read


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
    rows = re.findall(r"<tr><td>(fifo|srtf|rr)</td>(.*?)</tr>", document)
    mean_jct = {name: re.findall(r'<td class="([\w ]+)">', row)[1] for name, row in rows[:3]}
    assert mean_jct["srtf"] == "good number"
    assert mean_jct["fifo"] == "number"


def test_times_of_a_table_are_in_one_unit() -> None:
    first, *_ = tables = list(simulation_page._tables(outcomes(60, "2x8")))
    assert first.note.startswith("Times in h. ")
    cells = [cell for table in tables for row in table.rows for cell in row[1:]]
    assert [cell for cell in cells if not re.fullmatch(r"[\d.,]+|–", cell)] == []


def test_means_of_different_jobs_are_not_compared() -> None:
    fifo, srtf, _ = outcomes(60, "2x8")
    early = Outcome.empty(srtf.trace, srtf.cluster, srtf.devices, "srtf")
    early.finish_s[:10] = srtf.finish_s[:10]
    early.complete = False
    assert simulation_page.headline([fifo, early]) == (
        "Different jobs have ended: 60 under fifo, 10 under srtf; their mean times do not compare"
    )
    assert 'class="good' not in page([fifo, early])


def test_policies_that_are_equal_are_said_to_be() -> None:
    fifo, srtf, _ = outcomes(60, "2x8")
    twin = copy(srtf)
    twin.policy = "twin"
    assert simulation_page.headline([srtf, twin]).startswith("All 2 policies complete a job in ")
    assert simulation_page.headline([fifo, srtf, twin]).startswith("srtf and twin complete jobs soonest of 3")


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


@needs_browser
def test_a_browser_draws_it_and_its_key_works(tmp_path: Path) -> None:
    """The page's own script runs, and a probe reports the boxes that the browser gave to the marks."""
    script = """
    document.querySelector('button[data-of="1"]').click();
    const seen = (query) => [...document.querySelectorAll(query)].filter(
        (mark) => mark.getBoundingClientRect().width > 0 && mark.getBoundingClientRect().height > 0).length;
    return [seen('.line[data-of="0"]'), seen('.line[data-of="1"]'),
        seen('.gantt svg.plot'), seen('td.good') > 0, seen('path.job') > 60];"""
    found, console = probe(page(outcomes(60, "2x8")), script, tmp_path)
    assert found == [3, 0, 3, True, True]
    assert console == []
