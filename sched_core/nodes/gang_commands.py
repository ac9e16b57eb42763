"""Jobs with ranks on several nodes: one command per node, which together are the job's command."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpuslice.sched_core.core.events import Exited
from gpuslice.sched_core.jobs.program import Program

#: Beginning of the command that `gpuslice submit` makes for a script that waits for a launcher.
_STANDALONE = ("torch.distributed.run", "--standalone", "--nproc-per-node")


class GangEnds:
    """The commands of jobs on several nodes, and which of them have ended."""

    def __init__(self) -> None:
        self._ends: dict[str, dict[str, Exited | None]] = {}
        self._first: dict[str, Exited] = {}

    def begin(self, job: str, nodes: Iterable[str]) -> None:
        """Record that ``job`` has a command on each of ``nodes`` from now on."""
        self._ends[job] = dict.fromkeys(nodes)
        self._first.pop(job, None)

    def note(self, node: str, end: Exited) -> Exited | None:
        """Record that a command has ended. Return the end of the job if it was the last one.

        The first failure is the job's end.
        """
        ends = self._ends.get(end.job, {})
        if node not in ends:
            return None  # of an attempt before
        ends[node] = end
        if end.code:
            self._first.setdefault(end.job, end)
        if any(other is None for other in ends.values()):
            return None
        self._ends.pop(end.job, None)
        return self._first.pop(end.job, end)

    def failed(self, job: str) -> bool:
        """Return True if a command of ``job`` has failed, so that the others must end."""
        return job in self._first

    def others(self, job: str) -> list[str]:
        """Return the nodes on which a command of ``job`` has not ended."""
        return [node for node, end in self._ends.get(job, {}).items() if end is None]


def on_node(program: Program, nodes: Sequence[str], node: str, *, host: str, port: int) -> Program:
    """Return the command of a job on one of its several nodes.

    Parameters
    ----------
    nodes
        The node of each rank.
    node
        The node whose command is returned.
    host, port
        Address of the first rank's node, and the port there at which the ranks meet.
    """
    names = list(dict.fromkeys(nodes))
    values = {
        "nnodes": str(len(names)),
        "node-rank": str(names.index(node)),
        "nproc-per-node": str(list(nodes).count(node)),
        "master-addr": host,
        "master-port": str(port),
    }
    options = tuple(word for name, value in values.items() for word in (f"--{name}", value))
    argv = list(program.argv)
    for start in range(len(argv) - len(_STANDALONE)):
        if tuple(argv[start : start + len(_STANDALONE)]) == _STANDALONE:
            argv[start + 1 : start + len(_STANDALONE) + 1] = options
            break
    environ = {f"PET_{name.replace('-', '_').upper()}": value for name, value in values.items()}
    environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    return Program(tuple(argv), program.directory, {**program.environ, **environ})
