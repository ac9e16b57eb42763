"""The ways in which jobs of one app can lie on an offer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from gpuslice.sched_core.cluster import Cluster, FreeDevices
from gpuslice.sched_core.job import Job

from .bids import Gang

#: Whether a job is faster on so many devices than on one less.
Gains = Callable[[Job, int], bool]


def gang_size(gang: Gang) -> int:
    """Return the number of devices of ``gang``."""
    return sum(count for _, count in gang[1])


def ways(
    asking: Sequence[Job], offer: FreeDevices, gains: Gains, widest: float, *, every_node: bool = True
) -> Iterator[list[Gang]]:
    """Yield gangs for 1, 2, … jobs of ``asking`` with their least numbers of devices, then with more.

    Without ``every_node`` only the first of nodes that are as good as each other for a single job.
    """
    if not asking:
        return
    first = asking[0]
    before: int | None = None
    held = len(first.placement)
    suits = held == first.least or (first.least < held <= widest and gains(first, held))
    suits = suits and first.may_be_on(offer.cluster.nodes(first.placement))
    if suits and offer.has(first.placement):
        # Ties go to the first option: a job that has run stays where it was.
        counts = where(first.placement, offer.cluster)
        before = counts[0][0] if len(counts) == 1 and held == first.least else None
        yield [(first.id, counts)]
    roomy = False
    for node in chain.from_iterable(offer.nodes_with[first.least :]):
        if not first.may_be_on({node}):
            continue
        roomy = True
        if node != before:
            yield [(first.id, ((node, first.least),))]
            if not every_node:
                break
    if roomy and len(asking) == 1 and first.least == first.most:
        return  # what follows would be the same
    left = {node: len(free) for node, free in enumerate(offer.on_node) if free}
    gangs: list[Gang] = []
    for job in asking:
        packed = _packed(job, job.least, left, offer.cluster)
        if packed is None:
            continue
        gangs.append((job.id, packed))
        for node, count in packed:
            left[node] -= count
        if len(gangs) > 1 or len(packed) > 1 or job is not first:
            yield list(gangs)
    yield from _wider(gangs, left, {job.id: job for job in asking}, gains, widest, offer.cluster)


def _wider(
    gangs: list[Gang],
    left: dict[int, int],
    jobs: dict[str, Job],
    gains: Gains,
    widest: float,
    cluster: Cluster,
) -> Iterator[list[Gang]]:
    """Yield ``gangs`` with one more device at a time, for the smallest job that gains by it."""
    growing = [number for number, (name, _) in enumerate(gangs) if jobs[name].least < jobs[name].most]
    size = sum(map(gang_size, gangs))
    while growing and size < widest and any(left.values()):
        number = min(growing, key=lambda one: (gang_size(gangs[one]), one))
        name, counts = gangs[number]
        for node, count in counts:
            left[node] += count
        wanted = gang_size(gangs[number]) + 1
        wider = _packed(jobs[name], wanted, left, cluster) if gains(jobs[name], wanted) else None
        if wider is None:
            growing.remove(number)
        gangs[number] = (name, wider or counts)
        for node, count in gangs[number][1]:
            left[node] -= count
        if wider is not None:
            size += 1
            yield list(gangs)


def _packed(
    job: Job, demand: int, left: dict[int, int], cluster: Cluster
) -> tuple[tuple[int, int], ...] | None:
    """Return the tightest node that takes ``demand`` devices, else the emptiest nodes until it is met.

    A job that needs one node stays on its own if that will do, and waits rather than take several.
    """
    if job.within:
        return _on_one_node(job, demand, left, cluster)
    if demand > sum(left.values()):
        return None
    fitting = [(count, node) for node, count in left.items() if count >= demand]
    if fitting:
        return ((min(fitting)[1], demand),)
    counts: list[tuple[int, int]] = []
    for node, count in sorted(left.items(), key=lambda item: (-item[1], item[0])):
        counts.append((node, min(count, demand)))
        demand -= counts[-1][1]
        if not demand:
            break
    return tuple(counts)


def _on_one_node(
    job: Job, demand: int, left: dict[int, int], cluster: Cluster
) -> tuple[tuple[int, int], ...] | None:
    before = cluster.nodes(job.placement)
    fitting = [node for node in job.within if left.get(node, 0) >= demand]
    node = min(fitting, key=lambda node: (node not in before, left[node], node), default=None)
    return None if node is None else ((node, demand),)


def where(devices: Sequence[int], cluster: Cluster) -> tuple[tuple[int, int], ...]:
    """Return the nodes of ``devices``, and how many of the devices each node has."""
    counts: dict[int, int] = {}
    for device in devices:
        node = cluster.node_of[device]
        counts[node] = counts.get(node, 0) + 1
    return tuple(counts.items())
