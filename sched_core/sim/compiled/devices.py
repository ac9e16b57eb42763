"""Which devices each job held, worked out from the log of a compiled run: any free ones (``Count``).

When jobs run does not depend on it: a compiled run counts devices, and logs who was started and released.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .arrays import compiled

#: Somebody got devices at ``time_s``, or with ``gives`` gave them back.
LOG = np.dtype([("time_s", np.float64), ("job", np.int32), ("gives", np.bool_)], align=True)
#: What a job holds: its first and last device, and since when.
HOLDING = np.dtype([("since_s", np.float64), ("first", np.int32), ("last", np.int32)], align=True)


class Held(NamedTuple):
    """The devices of each job, and the free devices of each node.

    Attributes
    ----------
    begins, node_of
        The first device of each node, the node of each device.
    free
        True if nobody holds a device, shape ``(devices,)``.
    after
        The next device of its holder, or -1, in the order in which they were chosen, shape ``(devices,)``.
    left, nodes
        How many devices of each node are free; how many nodes have just so many.
    holdings
        A ``HOLDING`` for every job.
    """

    begins: Any
    node_of: Any
    free: Any
    after: Any
    left: Any
    nodes: Any
    holdings: Any


class Found(NamedTuple):
    """Columns of ``Spans.extend``, with room for what is found."""

    job: Any
    start_s: Any
    end_s: Any
    counts: Any
    devices: Any


def assign(held: Held, demand: Any, log: Any, found: Found) -> int:
    """Read ``log`` and record who held which devices. Return how many spans ended."""
    spans = filled = 0
    for i in range(len(log)):
        job = log[i].job
        if not log[i].gives:
            held.holdings[job].since_s = log[i].time_s
            choose(held, job, demand[job])
            continue
        found.job[spans] = job
        found.start_s[spans], found.end_s[spans] = held.holdings[job].since_s, log[i].time_s
        found.counts[spans] = demand[job]
        give(held, job, found.devices, filled)
        filled += demand[job]
        spans += 1
    return spans


@compiled
def choose(held: Held, job: int, wanted: int) -> None:
    """Take devices for ``job``: of the nodes with the fewest free ones, lowest first (``Count.choose``)."""
    held.holdings[job].first = held.holdings[job].last = -1
    for left in range(1, len(held.nodes)):
        node = 0
        while wanted and held.nodes[left]:
            while held.left[node] != left:
                node += 1
            wanted -= take(held, job, node, min(wanted, left))


@compiled
def take(held: Held, job: int, node: int, count: int) -> int:
    """Give ``job`` the first ``count`` free devices of ``node``. Return ``count``."""
    held.nodes[held.left[node]] -= 1
    held.left[node] -= count
    held.nodes[held.left[node]] += 1
    holding, device, more = held.holdings[job], held.begins[node], count
    while more:
        if held.free[device]:
            held.free[device] = False
            held.after[device] = -1
            if holding.last < 0:
                holding.first = device
            else:
                held.after[holding.last] = device
            holding.last = device
            more -= 1
        device += 1
    return count


@compiled
def give(held: Held, job: int, devices: Any, filled: int) -> None:
    """Free the devices of ``job`` and list them in ``devices`` from place ``filled`` on."""
    device = held.holdings[job].first
    while device >= 0:
        devices[filled] = device
        filled += 1
        held.free[device] = True
        node = held.node_of[device]
        held.nodes[held.left[node]] -= 1
        held.left[node] += 1
        held.nodes[held.left[node]] += 1
        device = held.after[device]
