"""Jobs with ranks on several nodes: one command a node, which together are the job's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpuslice.sched_core.core.events import Exited
from gpuslice.sched_core.jobs.program import Program

#: What `gpuslice submit` makes of a script that waits for a launcher, but for the number that follows.
_STANDALONE = ("torch.distributed.run", "--standalone", "--nproc-per-node")


class GangEnds:
    """Which commands of which job have ended."""

    def __init__(self) -> None:
        self._ends: dict[str, dict[str, Exited | None]] = {}
        self._first: dict[str, Exited] = {}

    def begin(self, job: str, nodes: Iterable[str]) -> None:
        """``job`` has a command on each of ``nodes`` from now on."""
        self._ends[job] = dict.fromkeys(nodes)
        self._first.pop(job, None)

    def note(self, node: str, end: Exited) -> Exited | None:
        """One has ended; returns the end of the job if it was the last one. The first failure counts."""
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
        """Whether a command of ``job`` has failed, so that the others are to end."""
        return job in self._first

    def others(self, job: str) -> list[str]:
        """The nodes on which a command of ``job`` has not ended."""
        return [node for node, end in self._ends.get(job, {}).items() if end is None]


def on_node(program: Program, nodes: Sequence[str], node: str, *, host: str, port: int) -> Program:
    """The command of a job on one of its nodes, of which there are several.

    Parameters
    ----------
    nodes
        Of each rank.
    node
        Which.
    host, port
        Where its ranks meet: the address of the first rank's node, and a port there.
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
