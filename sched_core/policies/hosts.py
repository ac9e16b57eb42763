"""What nodes have besides devices, for policies that count several resources: CPUs and memory."""

from __future__ import annotations

from collections.abc import Sequence

from gpuslice.errors import ConfigError
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.job import Job

_GIB = 1 << 30


class Hosts:
    """The CPUs and memory of every node, and what is left of them.

    Parameters
    ----------
    cluster
        The nodes.
    cpus, memory_gib
        Capacity of each node; 0: not limited and not counted.
    """

    def __init__(self, cluster: Cluster, cpus: float = 0, memory_gib: float = 0) -> None:
        if cpus < 0 or memory_gib < 0:
            raise ConfigError(f"nodes cannot have {cpus} CPUs and {memory_gib} GiB", "give 0 for no limit")
        self._cluster = cluster
        self._nodes = sum(size > 0 for size in cluster.node_sizes)
        #: Capacity of one node: CPUs, bytes.
        self.capacity = (float(cpus), memory_gib * _GIB)
        self.left = [list(self.capacity) for _ in cluster.node_sizes]

    def needs(self, job: Job) -> tuple[float, float]:
        """Return the CPUs and bytes that the whole job takes. Return 0 for what is not limited."""
        asked = (float(job.spec.cpus), float(job.spec.host_memory_bytes))
        return (asked[0] if self.capacity[0] else 0.0, asked[1] if self.capacity[1] else 0.0)

    def shares(self, job: Job) -> tuple[float, float, float]:
        """Return the job's share of the cluster's devices, CPUs and memory."""
        cpus, host_memory_bytes = (
            need / (capacity * self._nodes) if capacity else 0.0
            for need, capacity in zip(self.needs(job), self.capacity, strict=True)
        )
        return job.demand / self._cluster.size, cpus, host_memory_bytes

    def fits(self, job: Job, devices: Sequence[int]) -> bool:
        """Return True if the nodes of ``devices`` have enough left for ``job``."""
        return all(
            part <= left + 1e-9
            for node, parts in self._parts(job, devices).items()
            for part, left in zip(parts, self.left[node], strict=True)
        )

    def take(self, job: Job, devices: Sequence[int], sign: int = 1) -> None:
        """Reserve the CPUs and memory of ``job`` on ``devices``. With ``sign`` −1 release them."""
        for node, parts in self._parts(job, devices).items():
            for kind, part in enumerate(parts):
                self.left[node][kind] -= sign * part

    def check(self, job: Job) -> None:
        """Raise an error if no placement could ever satisfy the job.

        Raises
        ------
        ConfigError
            If it needs more per device than a node has for one.
        """
        for need, capacity, what in zip(self.needs(job), self.capacity, ("CPUs", "bytes"), strict=True):
            if need / job.demand > capacity:
                raise ConfigError(
                    f"job {job.id} needs {need / job.demand:g} {what} a device; a node has {capacity:g}",
                    "raise the limit of the nodes",
                )

    def _parts(self, job: Job, devices: Sequence[int]) -> dict[int, tuple[float, float]]:
        counts: dict[int, int] = {}
        for device in devices:
            node = self._cluster.node_of[device]
            counts[node] = counts.get(node, 0) + 1
        cpus, host_memory_bytes = self.needs(job)
        return {
            node: (cpus * count / len(devices), host_memory_bytes * count / len(devices))
            for node, count in counts.items()
        }
