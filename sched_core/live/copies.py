"""The newest copy of each job's state on another node: where it is, and of which moment."""

from __future__ import annotations

from typing import NamedTuple

from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.lifecycle.events import Event, NodeLost, NodeSilent, Noted
from gpuslice.sched_core.lifecycle.node_map import listed


class Copy(NamedTuple):
    """A copy of a job's snapshot: the nodes that it came from and went to, and when it was taken."""

    sources: str
    targets: str
    taken_s: float


class Copies:
    """The copies that the events tell of, those of the journal included.

    A copy on a node that has fallen silent does not count any more: the machine may have been started anew,
    and its RAM disk is empty then.

    Parameters
    ----------
    core
        Knows where the jobs are.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._newest: dict[str, Copy] = {}

    def note(self, event: Event, now: float) -> None:
        """Note a new copy, or that a node which has some does not answer."""
        match event:
            case Noted(what="replicated", job=job, details={"from": sources, "to": targets, "age_s": age_s}):
                self._newest[job] = Copy(str(sources), str(targets), now - float(age_s or 0.0))
            case NodeSilent(node=node) | NodeLost(node=node):
                away = listed((node,))
                self._newest = {
                    name: one for name, one in self._newest.items() if away not in one.targets.split(",")
                }
            case _:
                pass

    def newest(self, job: Gang) -> Copy | None:
        """Return the newest copy of the state of ``job`` on nodes where its state is not; None if none is."""
        copy, nodes = self._newest.get(job.id), self._core.state.nodes
        if copy is None or job.state.ended:
            return None
        home = listed(nodes.named(nodes.state_nodes(job)[: job.keepers]))
        apart = set(home.split(",")).isdisjoint(copy.targets.split(","))
        return copy if home == copy.sources or apart else None
