"""The command of a job with ranks on several nodes: one for each node."""

from __future__ import annotations

from collections.abc import Sequence

from gpuslice.sched_core.jobs.program import Program

#: Beginning of the command that `gpuslice submit` makes for a script that waits for a launcher.
_STANDALONE = ("torch.distributed.run", "--standalone", "--nproc-per-node")


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
