"""The published simulator's recorded results, to the second."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from gpuslice.errors import UsageError
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.sim.peer import parse_peer
from gpuslice.sched_core.traces.formats import read_trace
from gpuslice.sched_core.traces.trace import Trace

DATA = Path(__file__).resolve().parents[2] / "data"
ORACLES = sorted((DATA / "oracles" / "tiresias").glob("*.csv"))
#: Tens of thousands of events each.
SLOW = ("dlas-gpu-05", "dlas-gpu-1", "dlas-gpu-2")


def results(trace: Trace, cluster: str, peer: str) -> list[tuple[float, float, int, int]]:
    outcome = parse_peer(peer).prepare(trace, Cluster.parse(cluster)).run()
    return [
        (
            outcome.first_start_s[i],
            outcome.finish_s[i],
            outcome.preemptions[i],
            outcome.promotions.get(i, 0),
        )
        for i in range(len(trace))
    ]


def _marked(path: Path) -> object:
    slow = path.name.startswith("philly") and path.name.split(".")[2] in SLOW
    return pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("oracle", [_marked(path) for path in ORACLES])
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
        ("tiresias:dlas-gpu/yarn", "yarn"),
        ("tiresias:fifo/random", "random"),
    ],
)
def test_unknown_peers_are_named(text: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        parse_peer(text)
