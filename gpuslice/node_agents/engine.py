"""The interface to whatever starts agents on other nodes: Ray (``ray_engine``) or ssh (``ssh_engine``)."""

from __future__ import annotations

from typing import Protocol

from gpuslice.nodes.plan import Answer
from gpuslice.nodes.shipping import Progress


class Engine(Protocol):
    """An engine that was given a request of the scheduler (``plan.Wanted``)."""

    def find(self) -> Answer:
        """Return the nodes that can be used, this one first, and remarks on those that cannot."""
        ...

    def begin(self) -> Answer:
        """Start an agent on each node, in place of an earlier scheduler's. Return those that run.

        A node on which no agent can be started is left out, with a remark.
        """
        ...

    def end(self) -> Answer:
        """End what is left on the nodes of agents that were told to leave. Return remarks on what stays."""
        ...

    def bring(self, job: str, progress: Progress) -> None:
        """Bring the newest whole snapshot of ``job`` to its ranks' nodes.

        ``progress`` is called with the bytes that have arrived, and those of all.

        Raises
        ------
        EnvironmentUnusableError
            If a node cannot be reached now.
        UsageError
            If no node has such a snapshot.
        """
        ...
