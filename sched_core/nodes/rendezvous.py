"""Where the ranks of a job with several nodes meet, a free port of the first rank's node; their commands."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gpuslice.sched_core.jobs.program import Program

_log = logging.getLogger(__name__)
#: Beginning of the command that `gpuslice submit` makes for a script that waits for a launcher.
_STANDALONE = ("torch.distributed.run", "--standalone", "--nproc-per-node")


class Ports:
    """Ports of this machine, each reserved for the ranks of one job.

    A bound socket that does not listen keeps the system from giving the port to others. A process that asks
    for exactly that port, with ``SO_REUSEADDR`` as torch's ``TCPStore`` does, gets it.
    """

    def __init__(self) -> None:
        self._held: dict[str, socket.socket] = {}

    def find(self, job: str, path: Path) -> int:
        """Return the port that was chosen before, or one that is free now on every address of this machine.

        A process that asks for exactly that port may take it before the ranks do; then this attempt fails.

        Parameters
        ----------
        path
            A file that keeps the choice, so that later calls return the same port.
        """
        with suppress(OSError, ValueError):
            return int(path.read_text())
        self.release(job)
        self._held[job] = held = _bound()
        port: int = held.getsockname()[1]
        try:
            path.write_text(f"{port}\n")
        except OSError as error:  # the port is reported all the same, but a later question gets another one
            _log.warning("cannot write %s: %s", path, error.strerror)
        return port

    def release(self, job: str) -> None:
        """Release the port of ``job``."""
        held = self._held.pop(job, None)
        if held is not None:
            held.close()

    def close(self) -> None:
        """Release all ports."""
        for job in list(self._held):
            self.release(job)


def _bound() -> socket.socket:
    """Return a socket bound to a free port on every address, which it can share."""
    both = socket.has_dualstack_ipv6()
    found = socket.socket(socket.AF_INET6 if both else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if both:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        found.bind(("", 0))
    except OSError:
        found.close()
        raise
    return found


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
