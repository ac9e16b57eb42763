"""Place jobs whose devices are to be on one node (``Job.within``, ``Job.stays_on``), for any placement."""

from __future__ import annotations

from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.job import Job

from .nodes import fewest_nodes
from .placement import Placement


def choose_devices(placement: Placement, job: Job, free: FreeDevices) -> tuple[int, ...] | None:
    """Return the devices that ``placement`` chooses of those that are open to ``job``.

    For a job that needs one node they are of one node.
    """
    free = free.without(job.closed) if job.closed else free
    devices = placement.choose(job, free)
    if job.stays_on is not None:
        return devices and _where_it_stays(job, job.stays_on, devices, free)
    if not job.within or devices is None or job.may_be_on(free.cluster.nodes(devices)):
        return devices
    return on_one_node(job, job.demand, free)


def _where_it_stays(
    job: Job, node: int, chosen: tuple[int, ...], free: FreeDevices
) -> tuple[int, ...] | None:
    """Return the ``chosen`` devices if all are on ``node``, else others of that node; None if too few."""
    if free.cluster.nodes(chosen) == {node}:
        return chosen
    there = sorted(free.on_node[node], key=lambda device: device not in job.placement)
    return tuple(sorted(there[: job.demand])) if len(there) >= job.demand else None


def kind_of(placement: Placement, job: Job) -> str:
    """Return ``Placement.kind``, extended by the nodes that the job may be on, and what is closed to it."""
    kind = placement.kind(job)
    if job.closed:
        kind = f"{kind} without {sorted(job.closed)}"
    if job.stays_on is not None:
        return f"{kind} stays on {job.stays_on}"
    return f"{kind} within {job.within}" if job.within else kind


def most_on_one_node(job: Job, free: FreeDevices) -> int:
    """Return how many devices ``job``, which needs one node, can have now."""
    return max(len(free.without(job.closed).on_node[node]) for node in job.within)


def on_one_node(job: Job, count: int, free: FreeDevices) -> tuple[int, ...] | None:
    """Return ``count`` devices on the job's former node, else on the fullest node that has them; or None."""
    free = free.without(job.closed)
    fitting = [node for node in job.within if len(free.on_node[node]) >= count]
    if not fitting:
        return None
    before = node_before(job, free)
    node = min(fitting, key=lambda node: (node != before, len(free.on_node[node]), node))
    kept = sorted(free.on_node[node], key=lambda device: device not in job.placement)
    return tuple(sorted(kept[:count]))


def node_before(job: Job, free: FreeDevices) -> int | None:
    """Return the node of the job's present or last devices; None if it never had any."""
    return free.cluster.node_of[job.placement[0]] if job.placement else None


def on_few_nodes(job: Job, count: int, free: FreeDevices) -> tuple[int, ...] | None:
    """Return ``count`` devices for ``job`` on as few nodes as possible; None if it cannot have them now."""
    return on_one_node(job, count, free) if job.within else fewest_nodes(count, free.without(job.closed))
