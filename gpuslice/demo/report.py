"""The result of the demonstration, as a table, as JSON, as a page and as a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuslice.profiler import html, page

from .recorder import JobRecord, Recorder
from .training import Training

_PAINTS = {
    "slice": page.Paint(),
    "suspend": page.Paint("#c62828"),
    "resume": page.Paint("#8e6bd6"),
    "parked": page.Paint(opacity=0.3),
    "waiting": page.Paint(opacity=0.12),
}


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one job. Digests are SHA-256 of parameters and optimizer state; empty after failures."""

    name: str
    about: str
    steps: int
    exit_code: int | None
    digest: str
    undisturbed_digest: str
    equal: bool
    last_loss: float | None
    slices: int
    suspends: int
    suspend_mean_s: float
    resume_mean_s: float


class SwitchResult(msgspec.Struct, frozen=True, kw_only=True):
    """One change of the device to another job. ``blackout_s`` is suspend + handoff + resume."""

    at_s: float
    leaving: str
    coming: str
    suspend_s: float
    handoff_s: float
    resume_s: float
    blackout_s: float
    nbytes: int


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of all jobs. ``share_lost`` is blackout over ``busy_s``: from first to last progress."""

    wall_s: float
    busy_s: float
    switches: int
    blackout_mean_s: float
    blackout_max_s: float
    share_lost: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``gpuslice demo --json``. The keys do not change."""

    ok: bool
    device: str
    quantum_s: float
    jobs: tuple[JobResult, ...]
    switches: tuple[SwitchResult, ...]
    totals: Totals
    page: str
    picture: str
    trace: str


def job_result(
    training: Training, record: JobRecord, digests: tuple[str, str], last_loss: float | None
) -> JobResult:
    """Return one job's outcome. ``digests`` are those of the shared and of the undisturbed run."""
    shared, undisturbed = digests
    return JobResult(
        name=training.name,
        about=training.about,
        steps=training.steps,
        exit_code=record.exit_code,
        digest=shared,
        undisturbed_digest=undisturbed,
        equal=bool(shared) and shared == undisturbed,
        last_loss=last_loss,
        slices=len(record.slices),
        suspends=len(record.suspends),
        suspend_mean_s=_mean([one.suspend_s for one in record.suspends]),
        resume_mean_s=_mean([one.resume_s for one in record.slices[1:]]),
    )


def result(
    recorder: Recorder, jobs: Sequence[JobResult], about: Mapping[str, Any], directory: Path
) -> Result:
    """Return the result of the demonstration. ``about`` holds ``device``, ``quantum_s`` and ``wall_s``."""
    blackouts_s = [switch.blackout_s for switch in recorder.switches]
    return Result(
        ok=all(job.equal and job.exit_code == 0 for job in jobs),
        device=about["device"],
        quantum_s=about["quantum_s"],
        jobs=tuple(jobs),
        switches=tuple(
            SwitchResult(
                at_s=switch.at_s,
                leaving=switch.leaving,
                coming=switch.coming,
                suspend_s=switch.suspend_s,
                handoff_s=switch.handoff_s,
                resume_s=switch.resume_s,
                blackout_s=switch.blackout_s,
                nbytes=switch.nbytes,
            )
            for switch in recorder.switches
        ),
        totals=Totals(
            wall_s=about["wall_s"],
            busy_s=recorder.busy_s,
            switches=len(blackouts_s),
            blackout_mean_s=_mean(blackouts_s),
            blackout_max_s=max(blackouts_s, default=0.0),
            share_lost=recorder.share_lost,
        ),
        page=str(directory / "index.html"),
        picture=str(directory / "timeline.svg"),
        trace=str(directory / "trace.json"),
    )


def write(found: Result, recorder: Recorder) -> None:
    """Write the page, its picture and the trace."""
    timeline = recorder.timeline()
    timeline.write_chrome(Path(found.trace))
    Path(found.picture).write_text(page.picture(timeline, _PAINTS), encoding="utf-8")
    tables = [_jobs(found), _switches(found)]
    document = page.page(headline(found), _lead(found)[1:], timeline, _PAINTS, tables)
    Path(found.page).write_text(document, encoding="utf-8")


def show(found: Result, console: Console) -> None:
    """Print the table, the summary and the paths of the page and the trace."""
    table = Table(
        title="Against the undisturbed runs",
        title_justify="left",
        box=SIMPLE,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    rows = _jobs(found)
    for index, header in enumerate(rows.header):
        table.add_column(header, justify="right" if index else "left", no_wrap=True)
    colours: dict[type[str], str] = {html.Good: "green", html.Bad: "red"}
    for row in rows.rows:
        table.add_row(*(Text(cell, colours.get(type(cell), "")) for cell in row))
    console.print(table)
    for line in _lead(found):
        console.print(line, highlight=False)
    console.print(f"page:  {found.page}", highlight=False, soft_wrap=True)
    console.print(
        f"trace: {found.trace} (open it at https://ui.perfetto.dev)", highlight=False, soft_wrap=True
    )


def headline(found: Result) -> str:
    """Return one sentence that sums up the demonstration."""
    jobs, different = len(found.jobs), sum(not job.equal for job in found.jobs)
    shared = f"{jobs} jobs shared {found.device} at {1 - found.totals.share_lost:.2f} of its speed"
    if different:
        return f"{shared}; {different} of {jobs} results {'differs' if different == 1 else 'differ'}"
    return f"{shared}; every result is bit-identical"


def _lead(found: Result) -> list[str]:
    totals = found.totals
    equal = sum(job.equal for job in found.jobs)
    return [
        f"{equal} of {len(found.jobs)} finished models are bit-identical to those of undisturbed runs.",
        f"{totals.switches} switches, blackout {totals.blackout_mean_s * 1e3:.1f} ms on average and "
        f"{totals.blackout_max_s * 1e3:.1f} ms at most; {totals.share_lost:.1%} of {totals.busy_s:.1f} s "
        f"lost to switching, with a quantum of {found.quantum_s:g} s.",
    ]


def _jobs(found: Result) -> html.Table:
    header = ("job", "equal", "steps", "loss", "slices", "suspend, ms", "resume, ms", "digest")
    rows = [
        (
            job.name,
            html.Good("yes") if job.equal else html.Bad("NO"),
            str(job.steps),
            "–" if job.last_loss is None else f"{job.last_loss:.4f}",
            str(job.slices),
            f"{job.suspend_mean_s * 1e3:.1f}",
            f"{job.resume_mean_s * 1e3:.1f}",
            _digest(job),
        )
        for job in found.jobs
    ]
    note = (
        "Equal: the digest of parameters and optimizer state is that of the undisturbed run. Times are means."
    )
    return html.Table("Jobs", header, rows, note)


def _digest(job: JobResult) -> str:
    """Return the job's digest; if it differs from the undisturbed run's, both."""
    shared, undisturbed = (digest[:8] or "none" for digest in (job.digest, job.undisturbed_digest))
    return shared if job.equal else f"{shared}, undisturbed {undisturbed}"


def _switches(found: Result) -> html.Table:
    header = (
        *("at, s", "leaving", "coming", "suspend, ms", "handoff, ms", "resume, ms", "blackout, ms"),
        "moved, MB",
    )
    rows = [
        (
            f"{switch.at_s:.2f}",
            switch.leaving,
            switch.coming,
            *(
                f"{seconds * 1e3:.1f}"
                for seconds in (switch.suspend_s, switch.handoff_s, switch.resume_s, switch.blackout_s)
            ),
            f"{switch.nbytes / 1e6:.1f}",
        )
        for switch in found.switches
    ]
    note = "Blackout: suspend, handoff and resume together. A job that has ended needs no suspend."
    return html.Table("Switches", header, rows, note)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
