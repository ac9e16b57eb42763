"""The lab's result as one HTML file that needs no network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gpuslice.profiler.html import Bad, Good, Table, document, render_table

from .pictures import heat_map, step_times, timeline, under_loads
from .result import Interval, Result, SetResult
from .stress import LEVELS
from .verdict import WORTH, VerdictName

_MIB = 1 << 20
#: What the headline says of each verdict.
_VERDICTS: dict[VerdictName, str] = {
    "pack": "to pack",
    "slice": "to slice",
    "separate": "to separate",
    "undecided": "undecided",
}
#: Intervals of a few rounds do not bear a larger number of further ones.
_TOLD_ROUNDS = 20
_COLOURED: dict[VerdictName, type[str]] = {"pack": Good, "separate": Bad}


def page(result: Result) -> str:
    """Return ``result`` as an HTML page. The JSON has more figures, and all their digits."""
    state = "" if result.complete else " Interrupted: not all was measured."
    lead = [
        f"Co-location on {result.device}, {result.repeats} rounds of {result.seconds:g} s. "
        f"Intervals: {100 * result.confidence:g} %.{state}",
        "Normalized throughput: steps per second together by steps per second alone, in the same trial. "
        f"Sliced: in turns of {result.turn_seconds:g} s; switches count. "
        "Where that was not measured, each member is assumed to get its share.",
    ]
    parts = [
        render_table(_sets(result)),
        *([heat_map(result)] if result.matrix is not None else []),
        *map(render_table, (_members(result), _jobs(result))),
        *_sensitivity(result),
        *step_times(result),
        *([timeline(result)] if result.trials else []),
    ]
    return document(headline(result), lead, parts)


def headline(result: Result) -> str:
    """Return how many sets of jobs have which verdict, in one sentence."""
    verdicts = Counter({one.members: one.verdict for one in result.sets}.values())
    if not verdicts:
        return f"No jobs were measured together on {result.device} yet"
    rounds = f" after {result.repeats} rounds" if result.complete else " so far"
    counts = [(verdicts[name], text) for name, text in _VERDICTS.items() if verdicts[name]]
    if verdicts.total() == 1:
        (one,) = {" + ".join(one.members) for one in result.sets}
        ((_, text),) = counts
        return f"{one} on {result.device}: {text}{rounds if verdicts['undecided'] else ''}"
    told = ", ".join(f"{count} {text}" for count, text in counts)
    return (
        f"{verdicts.total()} sets of jobs on {result.device}: {told}{rounds if verdicts['undecided'] else ''}"
    )


def interval_text(interval: Interval) -> str:
    """Return ``[low, high]`` as text."""
    return "(no interval yet)" if interval is None else f"[{interval[0]:.3f}, {interval[1]:.3f}]"


def verdict_text(one: SetResult) -> str:
    """Return the verdict as text, with the number of rounds that would decide it."""
    if one.verdict != "undecided":
        return one.verdict
    if one.more_rounds > _TOLD_ROUNDS:
        return "undecided, many rounds more"
    return f"undecided, about {one.more_rounds} {'round' if one.more_rounds == 1 else 'rounds'} more"


def _by_set(result: Result) -> dict[tuple[str, ...], dict[str, SetResult]]:
    """Return the results of each set by mode."""
    found: dict[tuple[str, ...], dict[str, SetResult]] = {}
    for one in result.sets:
        found.setdefault(one.members, {})[one.mode] = one
    return found


def _sets(result: Result) -> Table:
    rows = []
    for members, modes in _by_set(result).items():
        one = next(iter(modes.values()))
        rows.append(
            (
                " + ".join(members),
                _COLOURED.get(one.verdict, str)(verdict_text(one)),
                "–" if one.gain is None else f"{one.gain:.3f}",
                _interval(one.gain_interval),
                *(_total(modes.get(mode)) for mode in ("packed", "sliced")),
            )
        )
    header = ("set", "verdict", "gain", "its interval", "total packed", "total sliced")
    note = (
        "Gain: the total of normalized throughput packed by that sliced. pack: the gain's whole interval "
        f"lies above 1. slice: it lies below {WORTH:g}. separate: packing gains, but a job starves. "
        "undecided: the interval is too wide for any of them."
    )
    return Table("Sets", header, rows, note)


def _total(one: SetResult | None) -> str:
    return "–" if one is None else f"{one.total:.3f}{'' if one.measured else ', assumed'}"


def _members(result: Result) -> Table:
    rows = []
    for members, modes in _by_set(result).items():
        for at, name in enumerate(members):
            cells = []
            for mode in ("packed", "sliced"):
                one = modes.get(mode)
                cells += (
                    ["–", "–"] if one is None else [f"{one.normalized[at]:.3f}", _interval(one.interval[at])]
                )
            others = " + ".join(other for number, other in enumerate(members) if number != at)
            rows.append((name, others, *cells))
    header = ("job", "with", "packed", "its interval", "sliced", "its interval")
    return Table("Normalized throughput of each job", header, rows)


def _jobs(result: Result) -> Table:
    rows = [
        (
            job.name,
            f"{job.steps_per_second:.4g}",
            "–" if job.interval is None else f"{job.interval[0]:.4g} to {job.interval[1]:.4g}",
            "–" if job.memory_bytes is None else f"{job.memory_bytes / _MIB:.1f}",
        )
        for job in result.jobs
    ]
    return Table("Jobs alone", ("job", "steps/s", "its interval", "memory, MiB"), rows)


def _interval(interval: Interval) -> str:
    return "–" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"


def _sensitivity(result: Result) -> Iterator[str]:
    """Yield the parts about our own loads: their effect on each job, and predictions for pairs."""
    if not result.stress:
        return
    rows = [
        (one.job, one.kind, f"{one.pressure:.3f}", *(f"{value:.3f}" for value in one.normalized))
        for one in result.stress
    ]
    levels = [f"at {100 * level:g} %" for level in LEVELS]
    yield render_table(Table("Throughput under our own loads", ("job", "load", "pressure", *levels), rows))
    yield under_loads(result)
    if result.predictions:
        yield render_table(_predictions(result))
    off = result.prediction_error
    if off is not None:
        of_mean = "–" if off.mean_absolute_of_mean is None else f"{off.mean_absolute_of_mean:.3f}"
        header = ("pairs held out", "mean error", "greatest", "mean error of the mean of other pairs")
        row = (str(off.pairs), f"{off.mean_absolute:.3f}", f"{off.greatest:.3f}", of_mean)
        yield render_table(Table("Error of the predictions", header, [row]))


def _predictions(result: Result) -> Table:
    rows = [
        (
            name,
            " + ".join(other for number, other in enumerate(pair.members) if number != at),
            f"{pair.normalized[at]:.3f}",
            "–" if pair.measured is None else f"{pair.measured[at]:.3f}",
        )
        for pair in result.predictions
        for at, name in enumerate(pair.members)
    ]
    return Table("Predicted without having seen the pair", ("job", "with", "predicted", "measured"), rows)
