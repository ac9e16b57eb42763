"""What the simulator computes of a trace with the semantics of a peer."""

from __future__ import annotations

from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.sim.peer import parse_peer
from gpuslice.sched_core.traces.trace import Trace


def results(trace: Trace, cluster: str, peer: str) -> list[tuple[float, float, int, int]]:
    """By job: first start, finish, preemptions, promotions."""
    outcome = parse_peer(peer).prepare(trace, Cluster.parse(cluster)).run()
    return [
        (
            outcome.first_start_s[i],
            outcome.finish_s[i],
            outcome.preemptions[i],
            outcome.promotions.get(i, 0),
        )
        for i in range(len(trace))
    ]
