"""Speeds from the command line: ``linear``, or a file of measured slowdowns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from gpuslice.errors import UsageError
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.slowdown import Slowdown
from gpuslice.wire import NOT_A_VALUE

from .model import LinearSpeed, SpeedModel


class SpeedFile(msgspec.Struct, forbid_unknown_fields=True):
    """The contents of a file of measured slow-downs.

    Attributes
    ----------
    spread
        Slowdown on more nodes than needed, of all models.
    models
        The same by model.
    racks
        A further slowdown on more racks than needed, of all models.
    sockets
        Slowdown on more sockets of one node than needed, of all models.
    packed
        Speed of a job that shares its devices with one other; 0.5 is neither gain nor loss.
    pairs
        The same by model and neighbour: ``{"a": {"b": 0.7}}`` is the speed of ``a`` beside ``b``.
    """

    spread: float = 1.0
    models: dict[str, float] = {}
    racks: float = 1.0
    sockets: float = 1.0
    packed: float = 0.5
    pairs: dict[str, dict[str, float]] = {}


class MeasuredSpeed:
    """Slower when spread over racks, nodes or sockets and, as measured pair by pair, when packed.

    With several neighbours each takes its toll: the product of the speeds beside each of them.
    """

    def __init__(self, measured: SpeedFile) -> None:
        self._slowdown = Slowdown(measured.spread, measured.models, measured.racks, measured.sockets)
        self._packed = measured.packed
        self._pairs: Mapping[str, Mapping[str, float]] = measured.pairs

    def rate(self, job: Job, neighbours: Sequence[Job], cluster: Cluster) -> float:
        rate = len(job.placement) / job.demand
        rate /= self._slowdown.on(job.spec, job.placement, cluster)
        for other in neighbours:
            rate *= self._pairs.get(job.spec.model, {}).get(other.spec.model, self._packed)
        return rate


def parse_speed(text: str) -> SpeedModel:
    """Parse ``linear`` or the path of a JSON file (``SpeedFile``).

    Raises
    ------
    UsageError
        If it is neither, or a number in it is not possible.
    """
    if text == "linear":
        return LinearSpeed()
    path = Path(text)
    if path.suffix != ".json":
        raise UsageError(f"{text!r} is not a speed", "write linear, or the name of a .json file")
    try:
        measured = msgspec.json.decode(path.read_bytes(), type=SpeedFile)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except NOT_A_VALUE as error:
        raise UsageError(f"{path} holds no speeds: {error}", "see SpeedFile in docs/simulate.md") from error
    for value in (measured.packed, *(v for pair in measured.pairs.values() for v in pair.values())):
        if not 0 < value <= 1:
            raise UsageError(f"{path}: a packed job cannot run at {value} times its speed", "0 < speed <= 1")
    return MeasuredSpeed(measured)
