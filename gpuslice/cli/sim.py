"""``gpuslice sim``: simulate a trace under policies, and report the metrics."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuslice.errors import UsageError
from gpuslice.sched_core.switch_cost_model import SWITCH_SHARE

from .trace import read

if TYPE_CHECKING:
    from gpuslice.sched_core.sim.outcome import Outcome
    from gpuslice.sched_core.sim.run import Request
    from gpuslice.sched_core.sim.validate import Measured
    from gpuslice.sched_core.traces.trace import Trace


def command(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Trace file; see --format.")],
    cluster: Annotated[str, typer.Option(metavar="NODESxDEVICES", help="4x8, or 2x8+1x4.")],
    trace_format: Annotated[
        str, typer.Option("--format", help="auto, csv, philly, gavel, alibaba.")
    ] = "auto",
    policy: Annotated[str | None, typer.Option(metavar="NAME", help="The policy; 2das by default.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="K=V", help="Option of the policy; POLICY.K=V, placement.K=V for one."),
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which devices a job gets: consolidated, spread, skew, ..."),
    ] = None,
    defragment: Annotated[
        bool,
        typer.Option(
            "--defragment", help="Move scattered gangs together when a job leaves, where that pays."
        ),
    ] = False,
    cost: Annotated[
        str,
        typer.Option(help="Cost of a switch: none, fixed:62s, measured (by the scheduler here), or a .json."),
    ] = "none",
    switch_share: Annotated[
        float, typer.Option(metavar="SHARE", help="Slices last until --cost is at most this part of them.")
    ] = SWITCH_SHARE,
    speed: Annotated[
        str, typer.Option(help="Speed of jobs that are spread or packed: linear, or a .json.")
    ] = "linear",
    peer: Annotated[
        str | None, typer.Option(metavar="tiresias:SCHEDULE/SCHEME", help="Compute what that simulator does.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Several policies, in parallel.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="J", min=1, help="Processes for --compare; by default one a core.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="auto, plain or compiled: equal results; compiled is faster for long runs.")
    ] = "auto",
    clamp: Annotated[bool, typer.Option(help="Clamp jobs that are larger than the cluster.")] = False,
    retries: Annotated[
        str | None,
        typer.Option(metavar="CLASS:N,...", help="Retries of failures by class; by default as in the trace."),
    ] = None,
    throughputs: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Steps per second, for Gavel's traces.")
    ] = None,
    windows: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="When devices are reserved, paused or drained."),
    ] = None,
    json_out: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write metrics.")] = None,
    per_job: Annotated[Path | None, typer.Option(metavar="OUT.csv", help="Write one line per job.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="OUT.html", help="Write a page of pictures.")] = None,
    validate: Annotated[
        Path | None, typer.Option(metavar="MEASURED.csv", help="Compare with measured times.")
    ] = None,
    progress: Annotated[
        bool | None,
        typer.Option("--progress/--no-progress", help="Show progress; by default on a terminal only."),
    ] = None,
) -> None:
    """Simulate a trace of jobs under one or more policies.

    Exit code 2 if the trace, the cluster, an option or a plan of the policy is wrong.
    Ctrl-C reports what is known so far.
    """
    from gpuslice.launch.command import check_outputs
    from gpuslice.sched_core.cluster import Cluster
    from gpuslice.sched_core.sim.run import Request
    from gpuslice.sched_core.sim.validate import read_measured
    from gpuslice.sched_core.traces.day import read_windows

    names = _names(policy, compare)
    if peer and (
        policy or compare or settings or placement or defragment or (cost, speed) != ("none", "linear")
    ):
        raise UsageError(
            "--peer sets policy, placement, cost and speed itself",
            "leave out --policy, --compare, --set, --placement, --defragment, --cost, --speed",
        )
    # Before hours of simulation.
    outputs = {"--json": json_out, "--per-job": per_job, "--html": html}
    check_outputs(outputs, inputs=(trace, throughputs, validate, windows), devices=True)
    loaded, spared = _load(trace, trace_format, throughputs, cluster if clamp else None, retries)
    measured = None if validate is None else read_measured(validate, loaded)
    base = Request(
        loaded,
        cluster,
        names[0],
        placement=placement,
        cost=cost,
        switch_share=switch_share,
        speed=speed,
        peer=peer,
        keep_spans=json_out is not None or html is not None,
        engine=engine,
        windows=() if windows is None else read_windows(windows, Cluster.parse(cluster).size),
    )
    requests = _requests(base, names, [*(settings or []), *(["defragment=true"] if defragment else [])])
    show = sys.stderr.isatty() if progress is None else progress
    outcomes = _run(requests, jobs or os.cpu_count() or 1, show=show)
    if not _complete(outcomes, requests):
        sys.stderr.write("gpuslice: interrupted; these are the results so far\n")
    _report(outcomes, json_out, per_job, html, measured)
    typer.echo(spared, nl=bool(spared))
    if not _complete(outcomes, requests):
        raise typer.Exit(130)


def _load(
    path: Path, trace_format: str, throughputs: Path | None, clamp_to: str | None, retries: str | None
) -> tuple[Trace, str]:
    """Return the trace to simulate, and a sentence on what --retries has changed in it."""
    from gpuslice.sched_core.cluster import Cluster
    from gpuslice.sched_core.traces.attempts import parse_retries, retried

    trace = read(path, trace_format, throughputs)
    if clamp_to is not None:
        trace = trace.clamped(Cluster.parse(clamp_to).size)
    if retries is None:
        return trace, ""
    trace, spared = retried(trace, parse_retries(retries))
    return (
        trace,
        f"--retries {retries}: {spared.jobs} jobs end earlier, {spared.device_s:,.0f} device-seconds spared",
    )


def _names(policy: str | None, compare: str | None) -> list[str]:
    """Return the names of the policies to simulate."""
    if compare is None:
        return [policy or "2das"]
    if policy is not None:
        raise UsageError("--policy and --compare exclude each other", f"write --compare {policy},{compare}")
    names = [name.strip() for name in compare.split(",")]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"--compare names {twice} twice", "name every policy once")
    return names


def _requests(base: Request, policies: list[str], settings: list[str]) -> list[Request]:
    """Return one request per policy, each with the settings that the policy takes."""
    from gpuslice.sched_core.options import nearest
    from gpuslice.sched_core.policies.registry import policy_options

    plain, by_component = _parsed(settings)
    components = {*(["placement"] if base.placement else []), *policies}
    for component in by_component:
        if component not in components:
            raise UsageError(
                f"--set names {component!r}, which is not simulated", nearest(component, components)
            )
    takes = {name: policy_options(name) for name in policies}
    for key in plain:
        if len(policies) > 1 and not any(key in known for known in takes.values()):
            raise UsageError(f"none of the policies has an option {key!r}")
    return [
        replace(
            base,
            policy=name,
            options={
                **{k: v for k, v in plain.items() if len(policies) == 1 or k in takes[name]},
                **by_component.get(name, {}),
            },
            placement_options=by_component.get("placement", {}),
        )
        for name in policies
    ]


def _parsed(settings: list[str]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    plain: dict[str, str] = {}
    by_component: dict[str, dict[str, str]] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {setting} is not KEY=VALUE", "write for instance --set quantum_s=60")
        component, dot, rest = key.partition(".")
        if dot:
            by_component.setdefault(component, {})[rest] = value
        else:
            plain[key] = value
    return plain, by_component


def _run(requests: list[Request], workers: int, *, show: bool) -> list[Outcome]:
    from gpuslice.sched_core.sim.run import run_all, run_one

    if not show:
        return run_all(requests, workers) if len(requests) > 1 else [run_one(requests[0])]
    if len(requests) > 1:
        with _shown("policies", len(requests)) as done:
            return run_all(requests, workers, done)
    with _shown("jobs", len(requests[0].trace)) as done:
        return [run_one(requests[0], lambda count, _: done(count), _say_that_it_compiles)]


@contextmanager
def _shown(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows progress on stderr: a bar on a terminal, else a line for each tenth."""
    if not sys.stderr.isatty():
        yield _lines(what, total)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def _lines(what: str, total: int) -> Callable[[int], None]:
    """Write a line for each further tenth."""
    tenths = 0

    def write(done: int) -> None:
        nonlocal tenths
        if done * 10 // total > tenths:
            tenths = done * 10 // total
            sys.stderr.write(f"{what}: {done:,} of {total:,}\n")

    return write


def _say_that_it_compiles() -> None:
    sys.stderr.write("gpuslice: compiling the simulator, once for this installation; about half a minute\n")


def _complete(outcomes: list[Outcome], requests: list[Request]) -> bool:
    return len(outcomes) == len(requests) and all(outcome.complete for outcome in outcomes)


def _report(
    outcomes: list[Outcome],
    json_out: Path | None,
    per_job: Path | None,
    html: Path | None,
    measured: Measured | None,
) -> None:
    from gpuslice.sched_core.sim import report, table
    from gpuslice.sched_core.sim.validate import validate

    from . import simulation_page

    found = [] if measured is None else [validate(outcome, measured) for outcome in outcomes]
    typer.echo(table.render(outcomes))  # first: what cannot be written must not take it along
    for outcome, distance in zip(outcomes, found, strict=False):
        typer.echo(table.render_validation(outcome, distance))
    try:
        if per_job is not None:
            for outcome in outcomes:
                report.write_per_job(outcome, report.path_for(per_job, outcome, several=len(outcomes) > 1))
        if json_out is not None:
            report.write_json(outcomes, json_out, found)
        if html is not None and outcomes:
            html.write_text(simulation_page.page(outcomes), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}") from error
