"""What ``gpuslice colocate`` found out about pairs, read from its JSON, for a scheduler that packs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, log
from pathlib import Path
from typing import Any

import msgspec

from gpuslice.errors import UsageError
from gpuslice.sched_core.interference import Prior
from gpuslice.sched_core.policies.gandiva.live_packing import script_of
from gpuslice.types import Text, explain

_MOST_BYTES = 256 << 20
#: A profile is of another day, perhaps of another machine: it is never taken to be sharper than that.
_LEAST_ERROR = 0.1
#: Where a pair was measured once only.
_ERROR_OF_ONE = 0.3
_REMEDY = "write it with `gpuslice colocate --json FILE`"

Bounds = tuple[float, float] | None


class PairPrior(msgspec.Struct, frozen=True):
    """What is known of a job (``script``, with its arguments) beside another."""

    script: Text
    beside: Text
    prior: Prior


class _Set(msgspec.Struct):
    members: tuple[str, ...]
    mode: str
    measured: bool
    normalized: tuple[float, ...]
    interval: tuple[Bounds, ...]


class _Lab(msgspec.Struct):
    names: tuple[str, ...]
    repeats: int
    confidence: float
    sets: tuple[_Set, ...]


def read_profiles(path: Path) -> tuple[PairPrior, ...]:
    """What the file says of pairs that were measured together, in order of their names.

    Raises
    ------
    UsageError
        If it cannot be read, is none of these files, or says nothing of a pair.
    """
    lab = _read(path)
    if not 0 < lab.confidence < 1 or lab.repeats < 1:
        raise UsageError(f"--profiles {path}: a confidence of {lab.confidence:g} is not possible", _REMEDY)
    scripts = {name: _script(name) for name in lab.names}
    found: dict[tuple[str, str], Prior] = {}
    for one in lab.sets:
        if one.mode != "packed" or len(one.members) != 2 or not one.measured:
            continue
        for member, beside, value, bounds in _members(path, one, scripts):
            found.setdefault((member, beside), _prior(value, bounds, lab))
    if not found:
        raise UsageError(f"--profiles {path} says nothing of two scripts together", _REMEDY + ", of pairs")
    return tuple(PairPrior(*scripts, prior) for scripts, prior in sorted(found.items()))


def by_scripts(priors: Sequence[PairPrior]) -> dict[tuple[str, str], Prior]:
    """The priors by both scripts."""
    return {(one.script, one.beside): one.prior for one in priors}


def _read(path: Path) -> _Lab:
    try:
        with path.open("rb") as file:
            written = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--profiles {path} cannot be read: {error.strerror}", _REMEDY) from error
    if len(written) > _MOST_BYTES:
        raise UsageError(f"--profiles {path} has more than {_MOST_BYTES >> 20} MiB", _REMEDY)
    try:
        content: Any = msgspec.json.decode(written)
        if isinstance(content, dict) and "step_seconds" in content:
            raise UsageError(f"--profiles {path} is the profile of one job, not of pairs", _REMEDY)
        return msgspec.convert(content, _Lab)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        raise UsageError(f"--profiles {path} is no result of the lab: {explain(error)}", _REMEDY) from error


def _members(path: Path, one: _Set, scripts: Mapping[str, str]) -> Iterator[tuple[str, str, float, Bounds]]:
    """Both members of a pair, each with the other and with what was measured of it."""
    whole = len(one.normalized) == len(one.interval) == 2 and all(name in scripts for name in one.members)
    bounds = [bound for pair in one.interval for bound in pair or ()]
    if not whole or not all(isfinite(value) and value > 0 for value in one.normalized):
        raise UsageError(f"--profiles {path}: the set {' + '.join(one.members)} is not possible", _REMEDY)
    if not all(map(isfinite, bounds)):
        raise UsageError(
            f"--profiles {path}: an interval of {' + '.join(one.members)} is not finite", _REMEDY
        )
    first, second = (scripts[name] for name in one.members)
    yield first, second, one.normalized[0], one.interval[0]
    yield second, first, one.normalized[1], one.interval[1]


def _script(name: str) -> str:
    """The lab's name of a script as a job of it would be called; once more the same has a number."""
    try:
        words = shlex.split(name.rpartition(" #")[0] if _is_again(name) else name)
    except ValueError:
        words = name.split()
    return script_of(" ".join(words))


def _is_again(name: str) -> bool:
    return name.rpartition(" #")[2].isdecimal()


def _prior(value: float, bounds: Bounds, lab: _Lab) -> Prior:
    """The logarithm, and the standard error that the interval of the mean of some rounds comes of."""
    if bounds is None or lab.repeats < 2:
        return Prior(log(value), _ERROR_OF_ONE)
    from scipy import stats  # late: half a second that only whoever has profiles has to spend

    quantile = float(stats.t.ppf((1 + lab.confidence) / 2, lab.repeats - 1))
    return Prior(log(value), max(_LEAST_ERROR, abs(bounds[1] - bounds[0]) / 2 / quantile / value))
