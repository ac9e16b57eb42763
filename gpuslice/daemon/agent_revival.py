"""New agents on nodes that have lost theirs, for instance by a reboot.

What keeps an agent alive there is gone with the machine. So the scheduler asks ssh or Ray again, after pauses
that double. An agent that runs is left alone, even if nothing is heard of it: there are never two.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from gpuslice.errors import GpusliceError
from gpuslice.nodes.plan import Answer, Remark
from gpuslice.sched_core.nodes.remote_nodes import RemoteNode, RemoteNodes

from .node_reports import NodeReports

_LOOK_AGAIN_S = 1.0
#: A node of which nothing is heard for so long may have no agent.
_SILENT_S = 5.0
#: The pauses between two tries for a node: the first, and the longest.
_FIRST_S, _LONGEST_S = 2.0, 10.0
#: How long one try waits for nodes that are not in the Ray cluster.
PATIENCE_S = 15.0

Started = Callable[[subprocess.Popen[bytes]], object]


class AgentRevival(threading.Thread):
    """The thread that asks for agents.

    Parameters
    ----------
    begin
        Starts an agent on each of the named nodes where none runs. Calls its second argument with the process
        that does it.
    remote
        The nodes; only read.
    reports
        Is told what is in the way.
    """

    def __init__(
        self, begin: Callable[[Sequence[str], Started], Answer], remote: RemoteNodes, reports: NodeReports
    ) -> None:
        super().__init__(name="agent-revival", daemon=True)
        self._begin, self._remote, self._reports = begin, remote, reports
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
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

    def end(self, grace_s: float) -> None:
        """Ask no more. A try that is under way and does not end within ``grace_s`` is killed."""
        self._ended.set()
        if self.is_alive():
            self.join(grace_s)
        with self._lock:
            if self._process is not None:
                self._process.kill()
        if self.is_alive():
            self.join()

    def _note(self, process: subprocess.Popen[bytes]) -> None:
        """Take note of the process that tries."""
        with self._lock:
            self._process = process

    def _is_silent(self, node: RemoteNode) -> bool:
        return not node.misfit and self._remote.silent_s(node) > _SILENT_S

    def _try(self, names: Sequence[str]) -> None:
        try:
            found = self._begin(names, self._note)
        except GpusliceError as error:
            wrong = {name: Remark.of(name, error) for name in names}
        else:
            wrong = {one.node: one for one in found.remarks}
        for name in names:
            _, pause_s = self._tries.get(name, (0.0, _FIRST_S))
            self._tries[name] = time.monotonic() + pause_s, min(2 * pause_s, _LONGEST_S)
            self._reports.missed(name, wrong.get(name))
