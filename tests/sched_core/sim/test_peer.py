"""The published simulator's recorded results, to the second.

The four longest recordings are for ``./x soak oracles``, which sets ``GPUSLICE_ORACLES=all``. The suite has
shorter ones of the same schedules.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from gpuslice.errors import UsageError
from gpuslice.sched_core.sim.peer import parse_peer
from gpuslice.sched_core.traces.formats import read_trace
from gpuslice.sched_core.traces.trace import Trace

from .peer_results import results

DATA = Path(__file__).resolve().parents[2] / "data"
ORACLES = sorted((DATA / "oracles" / "tiresias").glob("*.csv"))
#: Tens of thousands of events each.
LONG = (
    ()
    if os.environ.get("GPUSLICE_ORACLES") == "all"
    else ("dlas-gpu-05", "dlas-gpu-1", "dlas-gpu-2", "dlas-gpu-8")
)


def _is_long(path: Path) -> bool:
    return path.name.startswith("philly") and path.name.split(".")[2] in LONG


@pytest.mark.parametrize(
    "oracle", [path for path in ORACLES if not _is_long(path)], ids=lambda path: path.stem
)
def test_recorded_results(oracle: Path) -> None:
    name, cluster, schedule, scheme, _ = oracle.name.split(".")
    trace = read_trace(DATA / "traces" / f"{name}.csv")
    with oracle.open(encoding="utf-8") as file:
        rows = {row["job_id"]: row for row in csv.DictReader(file)}
    expected = [
        tuple(int(rows[job][key]) for key in ("start_time", "end_time", "preempt", "promote"))
        for job in trace.ids
    ]
    assert results(trace, cluster[1:].replace("g", "x"), f"tiresias:{schedule}/{scheme}") == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("gandiva:x/y", "gandiva"),
        ("tiresias:dlas-gp/count", "did you mean 'dlas-gpu'"),
        ("tiresias:shortest/yarn", "yarn"),
        ("tiresias:gandiva/count", "gandiva"),
        ("tiresias:fifo/random", "random"),
    ],
)
def test_unknown_peers_are_named(text: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        parse_peer(text)


def test_the_queues_ignore_the_scheme() -> None:
    trace = read_trace(DATA / "traces" / "60_job.csv")
    assert results(trace, "2x4", "tiresias:dlas-gpu/yarn") == results(trace, "2x4", "tiresias:dlas-gpu/count")


def test_durations_are_cut_down_to_whole_seconds() -> None:
    """The peer reads them so; it cannot read fractions in submission times."""
    trace = Trace(["a", "b"], [0, 3], [1, 1], [7.9, 2.2])
    assert [end for _, end, _, _ in results(trace, "1x1", "tiresias:fifo/count")] == [7, 9]
    with pytest.raises(UsageError, match=r"job a .* 0\.5"):
        results(Trace(["a"], [0.5], [1], [7]), "1x1", "tiresias:fifo/count")
