"""How much slower a job runs when its devices lie apart: S(G) of Themis, section 3.2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpuslice.errors import ConfigError

from .cluster import Cluster
from .job import JobSpec


class Slowdown:
    """The factors by which jobs are slower on more nodes, racks or sockets than they need. At least 1.

    Parameters
    ----------
    factor
        On more nodes than needed, for models without a factor of their own.
    models
        On more nodes than needed, by model name, as measured.
    racks, sockets
        A further factor on more racks than needed; the factor on more sockets of one node than needed.
    """

    def __init__(
        self,
        factor: float = 1.0,
        models: Mapping[str, float] | None = None,
        racks: float = 1.0,
        sockets: float = 1.0,
    ) -> None:
        self._factor = factor
        self._models = dict(models or {})
        self._racks, self._sockets = racks, sockets
        for name, value in {"factor": factor, "racks": racks, "sockets": sockets, **self._models}.items():
            if not value >= 1.0:
                raise ConfigError(f"slowdown {name}={value} would be a speed-up", "give at least 1")

    def of(self, spec: JobSpec, devices: int, nodes: int, cluster: Cluster) -> float:
        """Return the slowdown of ``devices`` devices on ``nodes`` nodes of ``cluster``."""
        fewest = -(-devices // max(cluster.node_sizes))
        return 1.0 if nodes <= fewest else self._models.get(spec.model, self._factor)

    def on(self, spec: JobSpec, devices: Sequence[int], cluster: Cluster) -> float:
        """Return the slowdown of a job on ``devices`` of ``cluster``."""
        extent, least = cluster.extent(devices), cluster.closest(len(devices))
        slowdown = self.of(spec, len(devices), extent.nodes, cluster)
        if extent.nodes == 1 and extent.sockets > least.sockets:
            slowdown *= self._sockets
        return slowdown * self._racks if extent.racks > least.racks else slowdown
