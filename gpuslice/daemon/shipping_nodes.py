"""The nodes of ``gpuslice ship``: those of a scheduler with ``--node``, or of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpuslice.config import load
from gpuslice.daemon.other_nodes import read_known
from gpuslice.errors import UsageError
from gpuslice.node_agents.ssh_engine import relay
from gpuslice.nodes import ray_nodes
from gpuslice.nodes.ray_nodes import Node
from gpuslice.nodes.replication import furthest
from gpuslice.nodes.shipping import Shipment, ship

#: What the scheduler's own node is called.
HERE = "here"
_ANSWER_S = 8.0


@dataclass(frozen=True)
class ShippingNodes:
    """What can be asked of the nodes.

    Attributes
    ----------
    all, find
        Return all nodes, or the one of that name.
    furthest
        Returns the node with a job's newest snapshot; see ``replication.furthest``.
    ship
        Ships; see ``shipping.ship``.
    """

    all: Callable[[], list[Node]]
    find: Callable[[str], Node]
    furthest: Callable[..., Node | None]
    ship: Callable[..., Shipment]


@contextmanager
def connected(directory: Path, ray: str | None) -> Iterator[ShippingNodes]:
    """Yield the nodes, connected.

    Parameters
    ----------
    directory
        That of a scheduler, which may have nodes by ssh.
    ray
        The head of a Ray cluster, if that is asked for.

    Raises
    ------
    EnvironmentUnusableError
        If there is neither such a scheduler nor a cluster.
    """
    known = read_known(directory) if ray is None else None
    if known is None or any(node.ray_name for node in known.nodes):
        with ray_nodes.connected(ray):
            yield ShippingNodes(ray_nodes.nodes, ray_nodes.find, furthest, ship)
        return
    nodes = [Node(node.name, node.name or HERE) for node in known.nodes]
    flags = {"ramdisk_dir": given} if (given := load().ramdisk_dir) else {}
    with relay(directory, known.endpoint, flags, _ANSWER_S) as carrier:
        yield ShippingNodes(
            lambda: nodes,
            partial(_find, nodes),
            partial(furthest, held_on=carrier.held_on),
            partial(ship, carrier=carrier),
        )


def _find(nodes: Sequence[Node], name: str) -> Node:
    for node in nodes:
        if node.name == name:
            return node
    listed = ", ".join(node.name for node in nodes)
    raise UsageError(f"the scheduler has no node {name}", f"name one of {listed}")
