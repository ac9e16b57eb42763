"""The compiled engine against the engine proper: every number of every job, to the last bit.

Everyday tests run the same functions interpreted, as compiling them takes long. ``./x soak oracles`` compiles
them for all orders.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.errors import UsageError
from gpuslice.sched_core.sim.compiled.rules import form_of
from gpuslice.sched_core.sim.outcome import Outcome
from gpuslice.sched_core.sim.run import Request, run_one
from gpuslice.sched_core.traces.formats import read_trace
from gpuslice.sched_core.traces.trace import Trace

PACKAGE = "gpuslice.sched_core.sim.compiled"
MODULES = ("arrays", "heaps", "keys", "ranking", "devices", "orders", "loop", "node_sets", "run")
DATA = Path(__file__).resolve().parents[2] / "data"
COLUMNS = (
    *("first_start_s", "finish_s", "stopped", "preemptions", "migrations", "executed_s", "service_s"),
    *("busy_s", "lost_s", "switching_s", "fair_share_s", "fragmented_s", "contention"),
)
ORDERS: tuple[tuple[str, dict[str, object]], ...] = (
    *((name, {}) for name in ("fifo", "fjf", "smallest", "sjf", "srtf", "srsf", "2das", "gittins")),
    ("las", {"quantum_s": "700", "by_devices": "false"}),
    ("rr", {"quantum_s": "700"}),
    ("las", {"quantum_s": "500"}),
    ("2das", {"thresholds": "500,4000", "first_slice_s": "90"}),
    ("gittins", {"thresholds": "500,4000"}),
)
#: With promotion, jobs that have hardly run yet are promoted again and again: fewer, longer ones.
PROMOTING: tuple[tuple[str, dict[str, object]], ...] = (
    ("2das", {"thresholds": "500,4000", "promote": "1.5"}),
    ("2das", {"by_devices": "false", "promote": "3"}),
    ("2das", {"thresholds": "500,4000", "promote": "1.5", "promote_waits": "last"}),
    ("gittins", {"thresholds": "500,4000", "promote": "2"}),
)
PEERS = (
    *("fifo", "fjf", "sjf", "lpjf", "shortest", "shortest-gpu", "shortest-expected", "dlas", "dlas-gpu"),
    *("dlas-gpu-05", "dlas-gpu-1", "dlas-gpu-8", "dlas-gpu-gittins"),
)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Any]:
    """The module that runs compiled simulations, with nothing compiled."""
    numba = importlib.import_module("numba")  # half a second that others who collect this file need not spend
    names = [f"{PACKAGE}.{name}" for name in MODULES]
    usual = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba.config, "DISABLE_JIT", True)
        module = importlib.import_module(names[-1])
    module.ranking = sys.modules[f"{PACKAGE}.ranking"]
    for name in names:
        del sys.modules[name]
    sys.modules.update(usual)
    return module


def differences(request: Request, run: Any) -> list[str]:
    """What the two engines do not agree on."""
    plain, simulation = request.prepare().run(), request.prepare()
    other: Outcome = run(simulation, form_of(simulation))
    found = [
        name
        for name in COLUMNS
        if not np.array_equal(getattr(plain, name), getattr(other, name), equal_nan=name != "stopped")
    ]
    if plain.spans != other.spans:
        found.append("spans")
    if plain.events != other.events:
        found.append("events")
    if dict(plain.promotions) != dict(other.promotions):
        found.append("promotions")
    return found


def trace_of(rows: list[tuple[float, int, float]]) -> Trace:
    submit, devices, duration = zip(*rows, strict=True)
    return Trace([str(i) for i in range(len(rows))], submit, devices, duration)


#: Coarse times, so that many things fall on one instant, or any.
WHOLE = st.tuples(
    st.integers(0, 40).map(lambda n: 325.0 * n),
    st.sampled_from([1, 1, 2, 3, 4, 8]),
    st.integers(0, 30).map(lambda n: 325.0 * n),
)
#: To the nanosecond: what is over in 1e-311 s has a rate that no float holds.
TIME_S = st.floats(0, 9000).map(lambda time_s: round(time_s, 9))
ANY = st.tuples(TIME_S, st.sampled_from([1, 2, 3, 5]), TIME_S)


BRIEF = settings(max_examples=8, deadline=None)


@pytest.mark.parametrize(("policy", "options"), ORDERS)
@BRIEF
@given(rows=st.lists(WHOLE, min_size=1, max_size=25) | st.lists(ANY, min_size=1, max_size=25), data=st.data())
def test_orders(
    interpreted: Any, policy: str, options: dict[str, object], rows: Any, data: st.DataObject
) -> None:
    cost = data.draw(st.sampled_from(["none", "fixed:62s", "fixed:500ms"]))
    cluster = data.draw(st.sampled_from(["1x8", "2x4", "3x2+1x5", "8x1"]))
    request = Request(trace_of(rows), cluster, policy, options, cost=cost, keep_spans=True)
    assert differences(request, interpreted.run) == []


@pytest.mark.parametrize(
    ("policy", "options"),
    [("srtf", {}), ("srsf", {}), ("las", {"quantum_s": "500"}), ("las", {"by_devices": "false"})],
)
@BRIEF
@given(rows=st.lists(WHOLE, min_size=1, max_size=25) | st.lists(ANY, min_size=1, max_size=25), data=st.data())
def test_one_key_after_the_other(
    interpreted: Any, policy: str, options: dict[str, object], rows: Any, data: st.DataObject
) -> None:
    """As with so many jobs that giving all of them new keys takes longer."""
    cost = data.draw(st.sampled_from(["none", "fixed:62s"]))
    request = Request(trace_of(rows), "2x4", policy, options, cost=cost, keep_spans=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreted.ranking, "_FEW", 1)
        assert differences(request, interpreted.run) == []


def test_who_is_not_back_within_a_slice_keeps_its_place(interpreted: Any) -> None:
    trace = trace_of([(0, 1, 975), (0, 8, 975), (0, 8, 650)])
    for quantum_s in ("700", "60"):
        request = Request(trace, "1x8", "rr", {"quantum_s": quantum_s}, cost="fixed:62s")
        assert differences(request, interpreted.run) == []


@pytest.mark.parametrize(("policy", "options"), PROMOTING)
@BRIEF
@given(rows=st.lists(WHOLE, min_size=1, max_size=8))
def test_promotion(interpreted: Any, policy: str, options: dict[str, object], rows: Any) -> None:
    request = Request(trace_of(rows), "2x4", policy, options, keep_spans=True)
    assert differences(request, interpreted.run) == []


@pytest.mark.parametrize("schedule", PEERS)
@BRIEF
@given(rows=st.lists(WHOLE, min_size=1, max_size=15))
def test_peers(interpreted: Any, schedule: str, rows: Any) -> None:
    request = Request(trace_of(rows), "2x4", peer=f"tiresias:{schedule}/count", keep_spans=True)
    assert differences(request, interpreted.run) == []


@BRIEF
@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 60).map(lambda n: 7.0 * n),
            st.sampled_from([1, 1, 2, 4, 8, 12]),
            st.integers(0, 60).map(lambda n: 31.0 * n),
        ),
        min_size=1,
        max_size=25,
    ),
    cluster=st.sampled_from(["3x4", "12x1", "2x8", "4x4"]),
)
def test_node_sets(interpreted: Any, rows: Any, cluster: str) -> None:
    request = Request(trace_of(rows), cluster, peer="tiresias:gandiva/gandiva")
    assert differences(request, interpreted.run) == []


@pytest.mark.parametrize("policy", ["fifo", "fjf", "sjf", "published-lpjf"])
@pytest.mark.parametrize("placement", ["consolidated", "published-yarn"])
@BRIEF
@given(rows=st.lists(WHOLE, min_size=1, max_size=25), cluster=st.sampled_from(["2x4", "4x3", "8x1", "1x8"]))
def test_nodes(interpreted: Any, policy: str, placement: str, rows: Any, cluster: str) -> None:
    request = Request(trace_of(rows), cluster, policy, placement=placement)
    assert differences(request, interpreted.run) == []


@pytest.mark.slow
def test_compiled_on_real_jobs() -> None:
    """Compiles, unless that was done before."""
    run = importlib.import_module(f"{PACKAGE}.run").run
    trace = read_trace(DATA / "traces" / "philly_ee9e8c_480.csv")
    whole = os.environ.get("GPUSLICE_ORACLES") == "all"
    for policy in ("fifo", "srtf", "2das", "gittins") if whole else ("2das",):
        assert differences(Request(trace, "16x4", policy), run) == [], policy
    for schedule in ("shortest", "dlas-gpu", "dlas-gpu-05", "dlas-gpu-gittins") if whole else ("dlas-gpu",):
        assert differences(Request(trace, "16x4", peer=f"tiresias:{schedule}/count"), run) == [], schedule


def test_ctrl_c_between_two_looks_at_the_log_loses_no_span(
    interpreted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is looked at every few events here; the first time Ctrl-C comes in the midst of it."""
    trace = trace_of([(0.0, 1, 100.0), (0.0, 1, 900.0), (5.0, 1, 400.0), (900.0, 1, 50.0)])
    request = Request(trace, "1x2", "las", {"quantum_s": "100"}, keep_spans=True)
    whole = request.prepare().run()
    read = interpreted._Holders.read

    def reading(self: Any, outcome: Outcome) -> None:
        signal.raise_signal(signal.SIGINT)
        read(self, outcome)

    monkeypatch.setattr(interpreted, "_EVENTS", 5)
    monkeypatch.setattr(interpreted._Holders, "read", reading)
    simulation = request.prepare()
    outcome = interpreted.run(simulation, form_of(simulation))
    assert not outcome.complete
    assert outcome.events == 5
    spans = list(outcome.spans)
    assert spans
    assert spans == list(whole.spans)[: len(spans)]


def test_what_cannot_be_compiled_says_so() -> None:
    base = Request(trace_of([(0, 1, 10)]), "1x8", "fifo", engine="compiled")
    for request in (
        replace(base, policy="gandiva"),
        replace(base, policy="srtf", placement="consolidated"),
        replace(base, placement="consolidated", cluster="1x8+1x4"),
        replace(base, placement="round-up"),
        replace(base, placement="consolidated", keep_spans=True),
        replace(base, peer="tiresias:gandiva/gandiva", keep_spans=True),
        replace(base, options={"trial_nodes": "1"}, cluster="2x8"),
    ):
        with pytest.raises(UsageError, match="cannot run compiled"):
            request.prepare()
    with pytest.raises(UsageError, match=r"no engine 'compild'.*compiled"):
        replace(base, engine="compild").prepare()


def test_short_runs_are_not_compiled() -> None:
    """Nor is numba imported for them."""
    before = f"{PACKAGE}.run" in sys.modules
    assert run_one(Request(trace_of([(0, 1, 10)]), "1x8", "2das")).finish_s[0] == 10
    assert (f"{PACKAGE}.run" in sys.modules) == before
