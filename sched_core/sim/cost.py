"""Switching costs from the command line: ``none``, ``fixed:62s``, or a file of measurements."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuslice.errors import UsageError
from gpuslice.sched_core.job import Job

from .model import FixedCost, NoCost, SwitchCost

_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
#: Stages of a switch during which the job makes no progress (docs/report.md); ``parked_s`` is another job's.
_STAGES = (
    *("quiesce_s", "find_s", "admit_s", "copy_out_s", "publish_s", "free_s"),
    *("reserve_s", "verify_s", "copy_in_s"),
)


class MeasuredCost:
    """Costs by model, with one for all others.

    Parameters
    ----------
    seconds
        Suspend and resume together, for models that ``by_model`` does not name.
    by_model
        The same by ``JobSpec.model``.
    """

    def __init__(self, seconds: float, by_model: Mapping[str, float]) -> None:
        self._seconds = seconds
        self._by_model = by_model

    def resume_s(self, job: Job) -> float:
        return self._by_model.get(job.spec.model, self._seconds)


def parse_cost(text: str) -> SwitchCost:
    """Read ``none``, ``fixed:TIME`` or the path of a JSON file.

    The file is a report of ``gpuslice run --report`` (the mean over its switches counts), what
    pytest-benchmark writes of ``benchmarks/suspend_latency`` and ``restore_latency`` (its medians), or an
    object with ``suspend_s`` and ``resume_s`` and perhaps ``models``, which maps names to such objects.

    Raises
    ------
    UsageError
        If it is none of these.
    """
    if text == "none":
        return NoCost()
    if text.startswith("fixed:"):
        return FixedCost(parse_time(text.removeprefix("fixed:")))
    path = Path(text)
    if path.suffix != ".json":
        raise UsageError(f"{text!r} is not a cost", "write none, fixed:62s, or the name of a .json file")
    try:
        measured = json.loads(path.read_text(encoding="utf-8"))
        if "switches" in measured:
            return FixedCost(_mean_switch_s(measured["switches"]))
        if "benchmarks" in measured:
            return FixedCost(_benchmarked_s(measured["benchmarks"]))
        models = measured.get("models", {})
        return MeasuredCost(_pair_s(measured), {name: _pair_s(pair) for name, pair in models.items()})
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path} holds no switching costs ({type(error).__name__}: {error})",
            "give a report of `gpuslice run --report`, or suspend_s and resume_s",
        ) from error


def parse_time(text: str) -> float:
    """Seconds of ``62s``, ``500ms``, ``2m``, ``1h`` or a bare number of seconds.

    Raises
    ------
    UsageError
        If ``text`` is not a time.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a time", "write 62s, 500ms, 2m or 1h")
    return float(match[1]) * _UNIT_S[match[2]]


def _pair_s(pair: Mapping[str, Any]) -> float:
    seconds = float(pair["suspend_s"]) + float(pair["resume_s"])
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{seconds} seconds")
    return seconds


def _mean_switch_s(switches: list[Mapping[str, Any]]) -> float:
    if not switches:
        raise ValueError("the report has no switches")
    return sum(float(switch[key]) for switch in switches for key in _STAGES) / len(switches)


def _benchmarked_s(benchmarks: list[Mapping[str, Any]]) -> float:
    """Of the first state that was measured: names are ``test_suspend`` or ``test_suspend[state]``."""
    medians_s: dict[str, float] = {}
    for entry in benchmarks:
        medians_s.setdefault(entry["name"].partition("[")[0], float(entry["stats"]["median"]))
    return _pair_s({"suspend_s": medians_s["test_suspend"], "resume_s": medians_s["test_resume"]})
