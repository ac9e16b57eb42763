"""Ray as the engine: an actor on each node of the cluster keeps an agent there."""

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

from gpuslice.errors import EnvironmentUnusableError, GpusliceError, NodeLostError, UsageError, last_line
from gpuslice.nodes.plan import SAID, Answer, Found, Remark, Wanted, of_node
from gpuslice.nodes.ray_nodes import Node, call, options_on, ray_module, result
from gpuslice.nodes.routes import Boundaries, boundaries, decode
from gpuslice.nodes.shipping import Progress, bring
from gpuslice.sched_core.nodes.local_node import rank_endpoint

from . import preflight
from .agent_process import LOG
from .keeper import AgentKeeper

NAMESPACE = "gpuslice"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
_DIGITS = 8
#: Longest start of an actor: Ray itself waits for ever for resources that others hold.
_READY_S = 60.0
#: Longest wait for agents that are told to leave by their actors.
_LEAVE_S = 12.0
#: A longer wait is told of.
_SAY_S = 5.0
_LOOK_AGAIN_S = 0.05


class RayEngine:
    """The engine of clusters of Ray; inside ``ray_nodes.connected``.

    Parameters
    ----------
    wanted
        The request.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted

    def find(self) -> Answer:
        """Return the living nodes of the cluster that can be used."""
        wanted = self._wanted
        nodes = living()
        known = {node.name or node.ray_name for node in nodes}
        if strange := set(wanted.without) - known:
            raise UsageError(
                f"--without {min(strange)}: there is no such node", f"there are {', '.join(sorted(known))}"
            )
        remarks = [Remark(name, "--without names it") for name in wanted.without]
        own = () if nodes[0].ray_name in wanted.without else of_node("", wanted.devices)
        here = preflight.look(own, wanted.working_directory)
        usable = []
        for node, facts, heard_s in _looked(wanted, [one for one in nodes if _is_wanted(wanted, one)]):
            found, said = preflight.judge(wanted, node, here, facts, heard_s)
            remarks += said
            usable += [found] if found is not None else []
        return Answer(tuple(usable), tuple(remarks))

    def begin(self) -> Answer:
        """Start an actor on each node."""
        wanted = self._wanted
        present = _living(wanted)
        gone = [node.name for node in wanted.nodes if node.name not in present]
        remarks = [Remark(name, "it is not in the Ray cluster", "start Ray there again") for name in gone]
        for node in present.values():
            _end(wanted, node)
        begun = []
        ends_s = time.monotonic() + _READY_S
        for node, actor in [(node, _begin(wanted, node)) for node in present.values()]:
            try:
                _await_ready(wanted, node, actor, ends_s)
            except Exception as error:  # noqa: BLE001 - whatever is wrong there, the others can be used
                _end(wanted, node)  # or its agent might come when nobody expects it
                remarks.append(_remark(node, error))
            else:
                begun.append(node)
        return Answer(tuple(begun), tuple(remarks))

    def end(self) -> Answer:
        """End the actors, and the agents that were not told to leave."""
        wanted, remarks = self._wanted, list[Remark]()
        ends_s = time.monotonic() + _LEAVE_S
        for node, left in [(node, _leave(wanted, node)) for node in wanted.nodes if node.name]:
            try:
                if left is not None and not ray_module().wait([left], timeout=_until(ends_s))[0]:
                    raise NodeLostError(f"it does not leave within {_LEAVE_S:g} s", "its node may be gone")
                if left is not None:
                    result(left)
            except GpusliceError as error:
                remarks.append(Remark.of(node.name, error))
        for node in wanted.nodes:
            _end(wanted, node)
        return Answer(remarks=tuple(remarks))

    def bring(self, job: str, progress: Progress) -> None:
        """Bring a snapshot by Ray's object store. A cluster that was started again gets its actors again."""
        wanted = self._wanted
        present = _living(wanted)
        for name in sorted({*wanted.targets, *wanted.sources}):
            if name not in present:
                raise EnvironmentUnusableError(
                    f"node {name or 'here'} is not in the Ray cluster now", "`ray status` shows the nodes"
                )
        _begin_missing(wanted, present.values())
        there = {name: _with_flags(wanted, node) for name, node in present.items()}
        held: dict[str, Boundaries] = {}
        for name, node in there.items():
            with suppress(NodeLostError):  # one that has just gone has nothing that could be sent
                held[name] = decode(call(boundaries, node, job, len(wanted.targets), node.flags))
        bring(job, wanted.targets, there, held, progress=progress)


def living() -> list[Found]:
    """Return the living nodes of the cluster, this one first."""
    ray = ray_module()
    here = ray.get_runtime_context().get_node_id()
    rows = [row for row in ray.nodes() if row["Alive"]]
    names = [row.get("NodeName") or row["NodeManagerAddress"] for row in rows]
    found = []
    for row, name in zip(rows, names, strict=True):
        unique = names.count(name) == 1 and _NAME.fullmatch(name) is not None
        ours = name if unique else f"node-{row['NodeID'][:_DIGITS]}"
        ours = "" if row["NodeID"] == here else ours
        found.append(Found(ours, row["NodeID"], name, row["NodeManagerAddress"]))
    return sorted(found, key=lambda node: (node.name, node.id))


def _looked(wanted: Wanted, nodes: Sequence[Found]) -> list[tuple[Found, preflight.Facts | Exception, float]]:
    """Return what each node has, or the error that it met, and when it answered."""
    ray = ray_module()
    asked = {}
    for node in nodes:
        devices = of_node(node.name, wanted.devices)
        remote = ray.remote(preflight.look).options(max_retries=0, **options_on(Node(node.id, node.name)))
        asked[remote.remote(devices, wanted.working_directory)] = node
    found: list[tuple[Found, preflight.Facts | Exception, float]] = []
    ends_s = time.monotonic() + _READY_S
    while asked and (ready := ray.wait(list(asked), timeout=_until(ends_s))[0]):
        node = asked.pop(ready[0])
        try:
            found.append((node, result(ready[0]), time.time()))
        except Exception as error:  # noqa: BLE001 - whatever is wrong there, the others can be used
            found.append((node, error, 0.0))
    slow = NodeLostError(f"Ray starts no process there within {_READY_S:g} s", "its raylet's log says why")
    order = {node.name: number for number, node in enumerate(nodes)}
    return sorted(
        [*found, *((node, slow, 0.0) for node in asked.values())], key=lambda one: order[one[0].name]
    )


def _remark(node: Found, error: Exception) -> Remark:
    """Return that ``node`` is left out because of ``error``, in a line."""
    if isinstance(error, GpusliceError):
        return Remark.of(node.name, error)
    reason = f"its agent cannot be started by Ray: {last_line(error)}"
    return Remark(node.name, reason, "Ray's logs there say more")


def _is_wanted(wanted: Wanted, node: Found) -> bool:
    return not node.name or node.name not in wanted.without


def _await_ready(wanted: Wanted, node: Found, actor: Any, ends_s: float) -> None:
    """Wait for the agent that an actor keeps. Raise what keeps it from running."""
    ready = actor.ready.remote()
    soon_s = min(_SAY_S, _until(ends_s))
    if not ray_module().wait([ready], timeout=soon_s)[0]:
        sys.stderr.write(
            f"{SAID}waits until Ray gives node {node.name or node.ray_name} to gpuslice, at most "
            f"{_READY_S:g} s; `ray status` shows who has its devices\n"
        )
        sys.stderr.flush()
    if not ray_module().wait([ready], timeout=_until(ends_s))[0]:
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
    devices = of_node(node.name, wanted.devices) if node.devices is None else node.devices
    gpus = sum(device.startswith("cuda") for device in devices)
    cpus = 0
    if devices and not gpus:
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
        "num_gpus": gpus,
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


def _until(moment_s: float) -> float:
    """Return how long it is until ``moment_s``; 0 if that has passed."""
    return max(0.0, moment_s - time.monotonic())


def _leave(wanted: Wanted, node: Found) -> Any:
    """Have the actor of ``node`` end its agent. Return when that is done as a reference; None: no actor."""
    try:
        return ray_module().get_actor(actor_name(wanted, node), namespace=NAMESPACE).leave.remote()
    except ValueError:
        return None


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


def _living(wanted: Wanted) -> dict[str, Found]:
    """Return the scheduler's nodes that are in the cluster, by name, with their present ids.

    A restarted node has another id, but the same name and address.
    """
    known = {node.id for node in wanted.nodes}
    now = living()
    present = {}
    for node in wanted.nodes:
        same = [one for one in now if one.id == node.id] or [
            one
            for one in now
            if one.id not in known and (one.ray_name, one.address) == (node.ray_name, node.address)
        ]
        if len(same) == 1:
            present[node.name] = msgspec.structs.replace(node, id=same[0].id)
    return present


def _begin_missing(wanted: Wanted, nodes: Iterable[Found]) -> None:
    for node in nodes:
        try:
            ray_module().get_actor(actor_name(wanted, node), namespace=NAMESPACE)
        except ValueError:
            _begin(wanted, node)


def _with_flags(wanted: Wanted, node: Found) -> Node:
    """Return a node with the flags that shipments need: the socket tells schedulers' jobs apart."""
    flags = {"socket": rank_endpoint(Path(_directory(wanted, node)))}
    if not node.name and wanted.ramdisk_dir:
        flags["ramdisk_dir"] = wanted.ramdisk_dir
    return Node(node.id, node.ray_name, flags)
