"""How fast the simulator is: throughput, memory, ratio to a peer's wall times.

    python benchmarks/sim_throughput/run.py OUT.json [--philly-20000 FILE] [--philly-82k FILE]
                                                     [--peer-runs DIR --peer-traces DIR [--peer-only]]

Each case runs in a process of its own, on one core, and is timed by CPU time as well as by the wall clock,
because other work on the machine disturbs the latter much more. Orders run twice, by the engine proper and
compiled; the results must be the same. Short cases are repeated and the best time counts. What it takes to
start the command, and to load and compile what is compiled, is measured by itself. The traces are not in the
repository; without them only the made-up cases run.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.sim.compiled.choice import is_kept
from gpuslice.sched_core.sim.compiled.rules import form_of
from gpuslice.sched_core.sim.engine import Simulation
from gpuslice.sched_core.sim.outcome import Outcome
from gpuslice.sched_core.sim.peer import parse_peer
from gpuslice.sched_core.traces.formats import read_trace
from gpuslice.sched_core.traces.synth import SynthSpec, synthesize
from gpuslice.sched_core.traces.trace import Trace

Case = Callable[[], Simulation]

#: A case is repeated until its runs took so long together.
LEAST_S = 0.5
MOST_RUNS = 100


def measure(name: str, prepare: Case) -> dict[str, Any]:
    """Run one simulation in a child process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(prepare, theirs))
    child.start()
    found: dict[str, Any] = {"case": name, **ours.recv()}
    child.join()
    print(
        f"{name}: {found['events']} events, {found['cpu_s']} s of CPU, compiled {found['compiled_cpu_s']}",
        flush=True,
    )
    return found


def _child(prepare: Case, pipe: Any) -> None:
    cpu_s, wall_s, outcome = _best(prepare, Simulation.run)
    found = {
        "jobs": len(outcome.trace),
        "events": outcome.events,
        "preemptions": int(outcome.preemptions.sum()),
        "wall_s": round(wall_s, 4),
        "cpu_s": round(cpu_s, 4),
        "us_per_event": round(cpu_s / outcome.events * 1e6, 2),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "compiled_cpu_s": None,
    }
    if form_of(prepare()) is not None:
        cpu_s, wall_s, compiled = _best(prepare, _run_compiled)
        assert compiled.finish_s.tobytes() == outcome.finish_s.tobytes()
        assert compiled.events == outcome.events
        found |= {
            "compiled_wall_s": round(wall_s, 5),
            "compiled_cpu_s": round(cpu_s, 5),
            "compiled_us_per_event": round(cpu_s / outcome.events * 1e6, 2),
            "peak_mib_with_compiled": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        }
    pipe.send(found)


def _best(prepare: Case, run: Callable[[Simulation], Outcome]) -> tuple[float, float, Outcome]:
    """CPU and wall time of the quickest of several runs, and what came of the last one."""
    taken: list[tuple[float, float]] = []
    while not taken or (sum(cpu_s for cpu_s, _ in taken) < LEAST_S and len(taken) < MOST_RUNS):
        simulation = prepare()
        before_s = time.process_time()
        outcome = run(simulation)
        taken.append((time.process_time() - before_s, outcome.wall_s))
    return *min(taken), outcome


def _run_compiled(simulation: Simulation) -> Outcome:
    from gpuslice.sched_core.sim.compiled.run import run

    form = form_of(simulation)
    assert form is not None
    outcome = run(simulation, form)
    assert outcome is not None
    return outcome


def loading() -> dict[str, Any]:
    """CPU time of importing numba and of compiling the loop, or of reading it if it was kept."""
    one = Trace(["a"], [0], [1], [1])
    simulation = Simulation(one, Cluster([1]), make_policy("fifo"))
    form, before_s = form_of(simulation), time.process_time()
    kept = form is not None and is_kept(form)
    import gpuslice.sched_core.sim.compiled.run  # noqa: F401

    imported_s = time.process_time()
    _run_compiled(simulation)
    ready_s = time.process_time() - imported_s
    _run_compiled(parse_peer("tiresias:gandiva/gandiva").prepare(one, Cluster([1])))
    return {
        "import_cpu_s": round(imported_s - before_s, 2),
        ("read" if kept else "compile") + "_cpu_s": round(ready_s, 2),
    }


def policy_case(trace: Callable[[], Trace], cluster: str, policy: str) -> Case:
    return lambda: Simulation(trace(), Cluster.parse(cluster), make_policy(policy))


def peer_ratios(directory: Path, traces: Path) -> list[dict[str, Any]]:
    """Our time beside the peer's recorded wall time, for the same trace, schedule and scheme."""
    ratios = []
    with (directory / "runs.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            peer = f"tiresias:{row['schedule']}/{row['scheme']}"
            trace = read_trace(traces / f"{row['trace']}.csv")
            cluster = Cluster.parse(row["cluster"][1:].replace("g", "x"))
            found = measure(
                f"{row['trace']} {peer}", lambda p=peer, t=trace, c=cluster: parse_peer(p).prepare(t, c)
            )
            ratios.append({**found, **_ratio(float(row["wall_s"]), found), "cluster": row["cluster"]})
    return ratios


def _ratio(peer_s: float, found: dict[str, Any]) -> dict[str, float]:
    ratio = {"peer_wall_s": peer_s, "ratio_cpu": round(peer_s / found["cpu_s"], 1)}
    if found["compiled_cpu_s"] is not None:
        ratio["ratio_compiled_cpu"] = round(peer_s / found["compiled_cpu_s"], 1)
    return ratio


def first(trace: Trace, jobs: int) -> Trace:
    """The first ``jobs`` of ``trace``."""
    return Trace(trace.ids[:jobs], trace.submit_s[:jobs], trace.demand[:jobs], trace.duration_s[:jobs])


def start_up_s(runs: int = 5) -> float:
    """CPU time of the whole command on a trace of one job: the interpreter, imports, reading, the report."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "one.csv")
        trace.write_text("job_id,num_gpu,submit_time,duration\na,1,0,1\n", encoding="utf-8")
        command = [sys.executable, "-m", "gpuslice", "sim", str(trace), "--cluster", "1x1"]
        taken_s = []
        for _ in range(runs):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            taken_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return round(min(taken_s), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--philly-20000", type=Path)
    parser.add_argument("--philly-82k", type=Path)
    parser.add_argument("--peer-runs", type=Path, help="folder with the peer's runs.csv")
    parser.add_argument("--peer-traces", type=Path, help="folder with the traces it names")
    parser.add_argument("--peer-only", action="store_true", help="no other cases")
    asked = parser.parse_args()
    cases: list[dict[str, Any]] = []
    load_average = os.getloadavg()[0]
    command_s, loading_s = start_up_s(), loading()
    for path, policies in (
        (asked.philly_20000, ("2das", "fifo", "srtf", "gittins")),
        (asked.philly_82k, ("2das", "fifo")),
    ):
        for policy in policies if path is not None else ():
            case = policy_case(lambda path=path: read_trace(path), "64x8", policy)
            cases.append(measure(f"{path.stem} 64x8 {policy}", case))
    if asked.philly_20000 is not None:
        peer, whole = parse_peer("tiresias:dlas-gpu/count"), read_trace(asked.philly_20000)
        for jobs in (5_000, 20_000):
            trace = first(whole, jobs)
            case = lambda t=trace: peer.prepare(t, Cluster.parse("64x8"))  # noqa: E731
            cases.append(measure(f"first {jobs} of philly_all_20000 64x8 tiresias:dlas-gpu/count", case))
        cases[-1] |= _ratio(381.0, cases[-1])
    if not asked.peer_only:
        spec = SynthSpec(jobs=1_000_000, load=0.98, devices=10_000, sigma=1.0)
        case = policy_case(lambda: synthesize(spec), "1250x8", "2das")
        cases.append(measure("synth-1e6 1250x8 2das", case))
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()},
        "load_average": load_average,
        "start_up_cpu_s": command_s,
        "compiled": loading_s,
        "cases": cases,
        "peer": peer_ratios(asked.peer_runs, asked.peer_traces) if asked.peer_runs else [],
    }
    asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
