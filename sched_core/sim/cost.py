"""What switching costs: nothing, a fixed time, or what a file of measurements or a journal says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from gpuslice.config import state_directory
from gpuslice.errors import UsageError
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.journal.journal import FILE, Journal
from gpuslice.sched_core.lifecycle.events import Reported, submitted
from gpuslice.sched_core.switch_cost_model import CostModel, Half, State
from gpuslice.wire import Resumed, Suspended

from .model import FixedCost, NoCost, SwitchCost

_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
#: Stages of a switch during which the job makes no progress (docs/json.md); ``parked_s`` is another job's.
_STAGES = (
    *("quiesce_s", "find_s", "admit_s", "copy_out_s", "publish_s", "free_s"),
    *("reserve_s", "copy_in_s"),
)


class MeasuredCost:
    """The measured cost of a switch by model, with one value for all other models.

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


class JournalCost:
    """The cost of switches as a live scheduler's journal has measured it.

    A job of ``device_memory_bytes`` costs what that many bytes do. Else it costs what its model did, and one
    of another model what a switch did on average.

    Parameters
    ----------
    path
        The journal.

    Raises
    ------
    UsageError
        If there is none, or it has no suspend and no resume.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UsageError(f"there is no journal {path}", "run jobs first, or write measured:DIRECTORY")
        self._costs = CostModel()
        #: What was moved, by model, newest last; all of it under the empty name.
        self._states: dict[str, list[State]] = {"": []}
        #: What was worked out, by model and bytes: simulations ask at every switch.
        self._known: dict[tuple[str, int], float] = {}
        models: dict[str, str] = {}
        last: dict[tuple[str, int], State] = {}
        with Journal(path, read_only=True) as journal:
            for event, _ in journal.replay():
                for spec, _ in submitted(event):
                    models[spec.id] = spec.model
                if isinstance(event, Reported):
                    self._learn(event, models.get(event.job, ""), last)
        if self._costs.switch(State(0)) is None:
            raise UsageError(f"{path} has no switches", "first run jobs that take turns")

    def resume_s(self, job: Job) -> float:
        key = job.spec.model, job.spec.device_memory_bytes
        if key not in self._known:
            self._known[key] = self._cost_s(*key)
        return self._known[key]

    def _cost_s(self, model: str, nbytes: int) -> float:
        states = self._states.get(model) or self._states[""]
        if nbytes:
            tensors = round(mean(state.tensors for state in states)) if states else 0
            states = [State(nbytes, tensors)]
        found = [self._costs.switch(state) for state in states]
        return mean(estimate.seconds for estimate in found if estimate is not None)

    def _learn(self, event: Reported, model: str, last: dict[tuple[str, int], State]) -> None:
        rank = event.job, event.rank
        match event.message:
            case Suspended() as message:
                state = last[rank] = State(message.nbytes, message.tensors)
                self._costs.learn(Half.SUSPEND, state, message.stages_s)
                for name in {model, ""}:
                    self._states.setdefault(name, []).append(state)
            case Resumed() as message if message.stages_s and rank in last:
                self._costs.learn(Half.RESUME, last[rank], message.stages_s)


def parse_cost(text: str) -> SwitchCost:
    """Parse ``none``, ``fixed:TIME``, ``measured``, ``measured:DIRECTORY`` or the path of a JSON file.

    ``measured`` is what the switches of the user's scheduler cost, or of the one that keeps its state in
    ``DIRECTORY``.

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
    if text == "measured" or text.startswith("measured:"):
        return JournalCost(state_directory(text.partition(":")[2]) / FILE)
    path = Path(text)
    if path.suffix != ".json":
        raise UsageError(
            f"{text!r} is not a cost", "write none, fixed:62s, measured, or the name of a .json file"
        )
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
    """Return the seconds of ``62s``, ``500ms``, ``2m``, ``1h`` or a bare number.

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
    return _checked_s(float(pair["suspend_s"]) + float(pair["resume_s"]))


def _checked_s(seconds: float) -> float:
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{seconds} seconds")
    return seconds


def _mean_switch_s(switches: list[Mapping[str, Any]]) -> float:
    if not switches:
        raise ValueError("the report has no switches")
    return _checked_s(sum(float(switch[key]) for switch in switches for key in _STAGES) / len(switches))


def _benchmarked_s(benchmarks: list[Mapping[str, Any]]) -> float:
    """Return the seconds of the first measured state, ``test_suspend`` or ``test_suspend[state]``."""
    medians_s: dict[str, float] = {}
    for entry in benchmarks:
        medians_s.setdefault(entry["name"].partition("[")[0], float(entry["stats"]["median"]))
    return _pair_s({"suspend_s": medians_s["test_suspend"], "resume_s": medians_s["test_resume"]})
