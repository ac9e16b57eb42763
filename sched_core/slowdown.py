"""How much slower a job runs when its devices lie on several nodes: S(G) of Themis, section 3.2."""

from __future__ import annotations

from collections.abc import Mapping

from gpuslice.errors import ConfigError

from .cluster import Cluster
from .job import JobSpec


class Slowdown:
    """1 on as few nodes as the devices can lie on, a factor on more.

    Parameters
    ----------
    factor
        For models without a factor of their own; at least 1.
    models
        Factors by model name, as measured.
    """

    def __init__(self, factor: float = 1.0, models: Mapping[str, float] | None = None) -> None:
        self._factor = factor
        self._models = dict(models or {})
        for name, value in {"factor": factor, **self._models}.items():
            if not value >= 1.0:
                raise ConfigError(f"slowdown {name}={value} would be a speed-up", "give at least 1")

    def of(self, spec: JobSpec, devices: int, nodes: int, cluster: Cluster) -> float:
        """The slowdown of ``devices`` devices on ``nodes`` nodes of ``cluster``."""
        fewest = -(-devices // max(cluster.node_sizes))
        return 1.0 if nodes <= fewest else self._models.get(spec.model, self._factor)
