"""``gpuslice trace``: look at, convert and make up traces."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuslice.errors import UsageError

if TYPE_CHECKING:
    from gpuslice.sched_core.traces.trace import Trace

app = typer.Typer(help="Look at, convert and make traces of jobs.")

TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="Trace file; see --format.")]
Format = Annotated[str, typer.Option("--format", help="auto, csv, philly, gavel or alibaba.")]
Throughputs = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Steps per second, for Gavel's traces.")
]


@app.command()
def stats(
    trace: TraceFile,
    trace_format: Format = "auto",
    throughputs: Throughputs = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print how many jobs a trace has, how long they run, what they ask for."""
    from gpuslice.sched_core.traces import describe

    found = describe.stats(read(trace, trace_format, throughputs))
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for key, value in found.items():
        if isinstance(value, dict):
            value = "  ".join(f"{name} {number:,.6g}" for name, number in value.items())
        typer.echo(f"{key:18} {value}")


@app.command()
def convert(
    trace: TraceFile,
    out: Annotated[Path, typer.Argument(metavar="OUT.csv", help="Where to write it.")],
    trace_format: Format = "auto",
    throughputs: Throughputs = None,
    unit: Annotated[str, typer.Option(help="What the trace's times count: 1s, 1m, 1h.")] = "1s",
) -> None:
    """Write a trace in gpuslice's own columns (docs/simulate.md)."""
    from gpuslice.sched_core.sim.cost import parse_time

    unit_s = parse_time(unit)
    if not unit_s > 0:
        raise UsageError(f"--unit {unit} is no unit of time", "write 1s, 1m or 1h")
    _write(read(trace, trace_format, throughputs).in_units_of(unit_s), out)


@app.command()
def synth(
    out: Annotated[Path, typer.Argument(metavar="OUT.csv", help="Where to write it.")],
    jobs: Annotated[int, typer.Option(help="How many jobs.")] = 1000,
    load: Annotated[float, typer.Option(help="Work that arrives, as a share of the cluster.")] = 0.9,
    cluster: Annotated[
        str, typer.Option(metavar="NODESxDEVICES", help="The cluster that --load refers to.")
    ] = "4x8",
    median_s: Annotated[float, typer.Option(help="Median duration, in seconds.")] = 1800.0,
    sigma: Annotated[float, typer.Option(help="Spread of durations: deviation of their logarithm.")] = 1.5,
    seed: Annotated[int, typer.Option(help="The same seed gives the same trace.")] = 0,
) -> None:
    """Make up a trace: Poisson arrivals, log-normal durations, demands near Philly's."""
    from gpuslice.sched_core.cluster import Cluster
    from gpuslice.sched_core.traces.synth import SynthSpec, synthesize

    devices = Cluster.parse(cluster).size
    _write(synthesize(SynthSpec(jobs, load, devices, median_s, sigma, seed)), out)


def read(path: Path, trace_format: str, throughputs: Path | None) -> Trace:
    """Return the trace at ``path``, and say on stderr how many of its jobs were left out, by cause."""
    from gpuslice.sched_core.traces.formats import read_trace

    trace = read_trace(path, trace_format, throughputs)
    if trace.left_out:
        sys.stderr.write(f"gpuslice: {path}: {trace.omissions}\n")
    return trace


def _write(trace: Trace, out: Path) -> None:
    from gpuslice.sched_core.traces.describe import write_csv

    try:
        write_csv(trace, out)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}", "choose another file") from error
