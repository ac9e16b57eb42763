"""What ``gpuslice colocate`` has measured of pairs, read from its JSON, for a scheduler that packs."""

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


class PairPrior(msgspec.Struct, frozen=True):
    """The measured effect of one job on another, known before the scheduler has samples of its own."""

    script: Text
    beside: Text
    prior: Prior


class _Set(msgspec.Struct):
    members: tuple[str, ...]
    mode: str
    measured: bool
    normalized: tuple[float, ...]
    error: tuple[float | None, ...]


class _Lab(msgspec.Struct):
    names: tuple[str, ...]
    sets: tuple[_Set, ...]


def read_profiles(path: Path) -> tuple[PairPrior, ...]:
    """Return the pairs that were measured together, as a file of `gpuslice colocate --json` has them.

    Raises
    ------
    UsageError
        If it cannot be read, is none of these files, or says nothing of a pair.
    """
    lab = _read(path)
    scripts = {name: _script(name) for name in lab.names}
    found: dict[tuple[str, str], Prior] = {}
    for one in lab.sets:
        if one.mode != "packed" or len(one.members) != 2 or not one.measured:
            continue
        for member, beside, value, error in _members(path, one, scripts):
            found.setdefault((member, beside), _prior(value, error))
    if not found:
        raise UsageError(f"--profiles {path} says nothing of two scripts together", _REMEDY + ", of pairs")
    return tuple(PairPrior(*scripts, prior) for scripts, prior in sorted(found.items()))


def by_scripts(priors: Sequence[PairPrior]) -> dict[tuple[str, str], Prior]:
    """Return the priors by both scripts of the pair."""
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


def _members(
    path: Path, one: _Set, scripts: Mapping[str, str]
) -> Iterator[tuple[str, str, float, float | None]]:
    """Yield both members of a pair, each with its partner and its measured throughput beside it."""
    whole = len(one.normalized) == len(one.error) == 2 and all(name in scripts for name in one.members)
    if not whole or not all(isfinite(value) and value > 0 for value in one.normalized):
        raise UsageError(f"--profiles {path}: the set {' + '.join(one.members)} is not possible", _REMEDY)
    if not all(error is None or (isfinite(error) and error >= 0) for error in one.error):
        raise UsageError(f"--profiles {path}: an error of {' + '.join(one.members)} is not possible", _REMEDY)
    first, second = (scripts[name] for name in one.members)
    yield first, second, one.normalized[0], one.error[0]
    yield second, first, one.normalized[1], one.error[1]


def _script(name: str) -> str:
    """Return the script, without the number that the lab adds to a name that comes again."""
    try:
        words = shlex.split(name.rpartition(" #")[0] if _is_again(name) else name)
    except ValueError:
        words = name.split()
    return script_of(" ".join(words))


def _is_again(name: str) -> bool:
    return name.rpartition(" #")[2].isdecimal()


def _prior(value: float, error: float | None) -> Prior:
    """Return the logarithm of a normalized throughput with its standard error."""
    return Prior(log(value), _ERROR_OF_ONE if error is None else max(_LEAST_ERROR, error / value))
