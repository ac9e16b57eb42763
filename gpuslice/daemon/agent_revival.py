"""New agents on machines that are reached by ssh and have lost theirs, for instance by a reboot.

What keeps an agent alive there is gone with the machine. So the scheduler asks again by ssh, after pauses
that double. A machine leaves an agent alone that runs, even if it is not heard of: there are never two.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from gpuslice.errors import GpusliceError
from gpuslice.nodes.plan import Answer
from gpuslice.sched_core.nodes.remote_nodes import RemoteNode, RemoteNodes

from .node_reports import NodeReports

_LOOK_AGAIN_S = 1.0
#: A node of which nothing is heard for so long may have no agent.
_SILENT_S = 5.0
#: The pauses between two tries for a node: the first, and the longest.
_FIRST_S, _LONGEST_S = 2.0, 60.0
#: Longest wait at the end for a try that is under way.
_END_S = 10.0


class AgentRevival(threading.Thread):
    """The thread that asks for agents.

    Parameters
    ----------
    begin
        Starts an agent on each of the named nodes where none runs.
    remote
        The nodes; only read.
    reports
        Is told what is in the way.
    """

    def __init__(
        self, begin: Callable[[Sequence[str]], Answer], remote: RemoteNodes, reports: NodeReports
    ) -> None:
        super().__init__(name="agent-revival", daemon=True)
        self._begin, self._remote, self._reports = begin, remote, reports
        self._ended = threading.Event()
        #: For each node that is silent: when the next try is due, and the pause after that.
        self._tries: dict[str, tuple[float, float]] = {}

    def run(self) -> None:
        """Look at the nodes again and again."""
        while not self._ended.wait(_LOOK_AGAIN_S):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Ask for agents on the nodes that are silent, as far as a try is due by ``now``."""
        due = []
        for node in list(self._remote.nodes.values()):
            if not self._is_silent(node):
                self._tries.pop(node.name, None)
            elif now >= self._tries.get(node.name, (now, _FIRST_S))[0]:
                due.append(node.name)
        if due:
            self._try(due)

    def end(self) -> None:
        """Ask no more. Wait for a moment until a try that is under way has ended."""
        self._ended.set()
        if self.is_alive():
            self.join(_END_S)

    def _is_silent(self, node: RemoteNode) -> bool:
        return not node.misfit and self._remote.silent_s(node) > _SILENT_S

    def _try(self, names: Sequence[str]) -> None:
        try:
            found = self._begin(names)
        except GpusliceError as error:
            wrong = dict.fromkeys(names, error.message)
        else:
            wrong = {one.node: one.reason for one in found.remarks}
        for name in names:
            _, pause_s = self._tries.get(name, (0.0, _FIRST_S))
            self._tries[name] = time.monotonic() + pause_s, min(2 * pause_s, _LONGEST_S)
            self._reports.missed(name, wrong.get(name, ""))
