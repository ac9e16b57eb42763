"""What the scheduler wants of Ray, each in a process of its own, so that it survives whatever becomes of Ray.

    python -m gpuslice.nodes.agents find             the cluster's nodes
    python -m gpuslice.nodes.agents begin            an actor on each node, which keeps an agent there
    python -m gpuslice.nodes.agents end              their end
    python -m gpuslice.nodes.agents bring JOB FILE   a job's newest snapshot to the nodes of its ranks

Each reads a ``Wanted`` from stdin or that file, as JSON; ``find`` writes a list of ``Found`` to stdout.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from gpuslice.errors import EnvironmentUnusableError, GpusliceError, NodeLostError, UsageError
from gpuslice.sched_core.nodes.local_node import rank_endpoint
from gpuslice.sched_core.nodes.transfers import UNREACHABLE

from .agent_process import LOG
from .keeper import AgentKeeper
from .plan import Found, Wanted
from .ray_nodes import Node, call, connected, ray_module, result
from .routes import Boundaries, boundaries, choose, decode
from .shipping import ship

NAMESPACE = "gpuslice"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
_DIGITS = 8
#: Wait before a node is reported as unreachable; the caller then tries again.
_UNREACHABLE_S = 5.0
#: Longest start of an actor: Ray itself waits for ever for resources that others hold.
_READY_S = 60.0
_LOOK_AGAIN_S = 0.05


def find() -> list[Found]:
    """Return the living nodes of the cluster, this one first."""
    ray = ray_module()
    here = ray.get_runtime_context().get_node_id()
    living = [row for row in ray.nodes() if row["Alive"]]
    names = [row.get("NodeName") or row["NodeManagerAddress"] for row in living]
    found = []
    for row, name in zip(living, names, strict=True):
        unique = names.count(name) == 1 and _NAME.fullmatch(name) is not None
        ours = name if unique else f"node-{row['NodeID'][:_DIGITS]}"
        ours = "" if row["NodeID"] == here else ours
        found.append(Found(ours, row["NodeID"], name, row["NodeManagerAddress"]))
    return sorted(found, key=lambda node: (node.name, node.id))


def begin(wanted: Wanted) -> None:
    """Start an actor on each node. An earlier scheduler's actor is replaced.

    Raises
    ------
    GpusliceError
        What one of them met.
    """
    nodes = _living(wanted).values()
    for node in nodes:
        _end(wanted, node)
    for node, actor in [(node, _begin(wanted, node)) for node in nodes]:
        ready = actor.ready.remote()
        if not ray_module().wait([ready], timeout=_READY_S)[0]:
            raise EnvironmentUnusableError(
                f"Ray does not give node {node.name or node.ray_name} to gpuslice within {_READY_S:g} s",
                "`ray status` shows who has its devices; stop them, or share fewer with --devices",
            )
        if not result(ready) and node.name:
            raise EnvironmentUnusableError(
                f"the agent of node {node.name} does not start",
                f"{_directory(wanted, node)}/{LOG} there says why",
            )


def _begin(wanted: Wanted, node: Found) -> Any:
    ray = ray_module()
    cpus = wanted.cpus
    if cpus < 0:
        (row,) = (row for row in ray.nodes() if row["NodeID"] == node.id)
        cpus = row["Resources"].get("CPU", 0)
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    options = {
        "name": actor_name(wanted, node),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_task_retries": -1,  # one that is just being restarted is asked again
        "num_cpus": cpus,
        "num_gpus": wanted.gpus,
        "scheduling_strategy": affinity(node.id, soft=False),
    }
    directory = _directory(wanted, node) if node.name else ""
    config = msgspec.json.encode(wanted.agents[node.name]) if node.name else b""
    return ray.remote(AgentKeeper).options(**options).remote(directory, config)


def actor_name(wanted: Wanted, node: Found) -> str:
    """Return the name of the actor of ``node``. The scheduler of another directory has its own actors."""
    scheduler = blake2b(wanted.directory.encode(), digest_size=4).hexdigest()
    return f"gpuslice-agent-{node.name or node.ray_name}-{scheduler}"


def _directory(wanted: Wanted, node: Found) -> str:
    """Return the directory of what gpuslice keeps on ``node``."""
    return f"{wanted.directory}/nodes/{node.name}" if node.name else wanted.directory


def end(wanted: Wanted) -> None:
    """End the actors. The scheduler tells their agents to leave."""
    for node in wanted.nodes:
        _end(wanted, node)


def _end(wanted: Wanted, node: Found) -> None:
    ray, name = ray_module(), actor_name(wanted, node)
    try:
        former = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return
    ray.kill(former, no_restart=True)
    ends_s = time.monotonic() + _READY_S
    while time.monotonic() < ends_s:  # its name is its own until it is gone
        try:
            ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return
        time.sleep(_LOOK_AGAIN_S)


def bring(wanted: Wanted, job: str) -> None:
    """Bring the newest whole snapshot of ``job`` to its ranks' nodes, from wherever each rank's lies.

    A cluster that was started again gets its actors again.

    Raises
    ------
    EnvironmentUnusableError
        If a node is not in the cluster that is not lost, or goes meanwhile.
    UsageError
        If no node has one.
    """
    living = _living(wanted)
    for name in {*wanted.targets, *wanted.sources} & {node.name for node in wanted.nodes}:
        if name not in living:
            raise EnvironmentUnusableError(
                f"node {name or 'here'} is not in the Ray cluster now", "`ray status` shows the nodes"
            )
    _begin_missing(wanted, living.values())
    there = {name: _with_flags(wanted, node) for name, node in living.items()}
    held: dict[str, Boundaries] = {}
    for name, node in there.items():
        with suppress(NodeLostError):  # one that has just gone has nothing that could be sent
            held[name] = decode(call(boundaries, node, job, len(wanted.targets), node.flags))
    if (routes := choose(held, wanted.targets)) is None:
        raise UsageError(f"no living node has a whole snapshot of {job}", "replicate it, see docs/nodes.md")
    for (source, target), ranks in routes.ways.items():
        ship(job, there[source], there[target], ranks=ranks, boundary=routes.boundary, replace=True)


def _living(wanted: Wanted) -> dict[str, Found]:
    """Return the scheduler's nodes that are in the cluster now, by name, with their present ids.

    A restarted node has another id, but the same name and address.
    """
    known = {node.id for node in wanted.nodes}
    now = find()
    living = {}
    for node in wanted.nodes:
        same = [one for one in now if one.id == node.id] or [
            one
            for one in now
            if one.id not in known and (one.ray_name, one.address) == (node.ray_name, node.address)
        ]
        if len(same) == 1:
            living[node.name] = msgspec.structs.replace(node, id=same[0].id)
    return living


def _begin_missing(wanted: Wanted, nodes: Iterable[Found]) -> None:
    for node in nodes:
        try:
            ray_module().get_actor(actor_name(wanted, node), namespace=NAMESPACE)
        except ValueError:
            _begin(wanted, node)


def _with_flags(wanted: Wanted, node: Found) -> Node:
    """Return a node with the settings that shipments need, such as the scheduler's socket."""
    flags = {"socket": rank_endpoint(Path(_directory(wanted, node)))}
    if not node.name and wanted.ramdisk_dir:
        flags["ramdisk_dir"] = wanted.ramdisk_dir
    return Node(node.id, node.ray_name, flags)


def main(words: Sequence[str]) -> None:
    """Run the command in ``words``."""
    source = Path(words[2]).read_bytes() if len(words) > 2 else sys.stdin.buffer.read()
    wanted = msgspec.json.decode(source, type=Wanted)
    with connected(wanted.address or None):
        match words:
            case ["find"]:
                sys.stdout.buffer.write(msgspec.json.encode(find()))
            case ["begin"]:
                begin(wanted)
            case ["end"]:
                end(wanted)
            case ["bring", job, _]:
                bring(wanted, job)
            case _:
                raise UsageError(f"{words} is not possible", "find, begin, end or bring JOB FILE")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except GpusliceError as error:
        sys.stderr.write(f"{error.message}\n{error.remedy}\n")
        if sys.argv[1:2] == ["bring"] and error.exit_code == UNREACHABLE:
            time.sleep(_UNREACHABLE_S)
        sys.exit(error.exit_code)
