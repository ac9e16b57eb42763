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
from gpuslice.version import __version__

from . import preflight
from .agent_process import LOG
from .keeper import AgentKeeper

NAMESPACE = "gpuslice"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
_DIGITS = 8
#: Longest wait for another node in each of ``find`` and ``begin``. It is used when it comes later.
_COME_S = 6.0
#: Longest wait for Ray to give the scheduler's own node: Ray itself waits for ever for resources.
_OWN_S = 60.0
#: A longer wait for the own node is told of.
_SAY_S = 5.0
#: Longest wait for agents that are told to leave by their actors.
_LEAVE_S = 12.0
#: Longest wait for the end of actors.
_GONE_S = 10.0
_LOOK_AGAIN_S = 0.05
#: Interval at which to look for nodes that are not in the cluster.
_PRESENT_AGAIN_S = 0.5


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
        for node, facts, heard_s in _looked(wanted, [one for one in nodes if _is_wanted(wanted, one)], here):
            if facts is None:
                usable.append(node)
                remarks.append(_late(node))
                continue
            found, said = preflight.judge(wanted, node, here, facts, heard_s)
            remarks += said
            usable += [found] if found is not None else []
        return Answer(tuple(usable), tuple(remarks))

    def begin(self) -> Answer:
        """Start an actor on each node where none keeps the agent that is wanted."""
        wanted = self._wanted
        present = self._await_present()
        gone = [node.name for node in wanted.nodes if node.name not in present]
        remarks = [Remark(name, "it is not in the Ray cluster", "start Ray there again") for name in gone]
        _end(_others(wanted, present.values()))
        begun = []
        soon_s = time.monotonic() + _COME_S
        for node, actor in [(node, _begin(wanted, node)) for node in present.values()]:
            try:
                came = _is_ready(wanted, node, actor, soon_s)
            except Exception as error:  # noqa: BLE001 - whatever is wrong there, the others can be used
                _end([_full_name(wanted, node)])
                remarks.append(_remark(node, error))
                continue
            if came:
                begun.append(node)
            elif not _is_known_late(node):
                remarks.append(_not_given(node))
        return Answer(tuple(begun), tuple(remarks))

    def end(self) -> Answer:
        """End the actors, and the agents that were not told to leave."""
        wanted, remarks = self._wanted, list[Remark]()
        ends_s = time.monotonic() + _LEAVE_S
        left = [(node, one) for node in wanted.nodes if node.name for one in _leave(wanted, node)]
        for node, reference in left:
            try:
                if not ray_module().wait([reference], timeout=_until(ends_s))[0]:
                    raise NodeLostError(f"it does not leave within {_LEAVE_S:g} s", "its node may be gone")
                result(reference)
            except GpusliceError as error:
                remarks.append(Remark.of(node.name, error))
        _end([name for node in wanted.nodes for name in actor_names(wanted, node)])
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

    def _await_present(self) -> dict[str, Found]:
        """Return the nodes that are in the cluster. Wait for a while if of the other nodes none is."""
        ends_s = time.monotonic() + self._wanted.patience_s
        while True:
            present = _living(self._wanted)
            if any(present) or time.monotonic() >= ends_s:
                return present
            time.sleep(_PRESENT_AGAIN_S)


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


def _looked(
    wanted: Wanted, nodes: Sequence[Found], here: preflight.Facts
) -> list[tuple[Found, preflight.Facts | Exception | None, float]]:
    """Return what each node has, or the error that it met, and when it answered; None: it is late."""
    ray = ray_module()
    asked = {}
    found: dict[str, tuple[preflight.Facts | Exception | None, float]] = {"": (here, here.unix_s)}
    for node in nodes:
        if node.name:
            devices = of_node(node.name, wanted.devices)
            remote = ray.remote(preflight.look).options(max_retries=0, **options_on(Node(node.id, node.name)))
            asked[remote.remote(devices, wanted.working_directory)] = node.name
    ends_s = time.monotonic() + _COME_S
    while asked and (ready := ray.wait(list(asked), timeout=_until(ends_s))[0]):
        name = asked.pop(ready[0])
        try:
            found[name] = result(ready[0]), time.time()
        except Exception as error:  # noqa: BLE001 - whatever is wrong there, the others can be used
            found[name] = error, 0.0
    return [(node, *found.get(node.name, (None, 0.0))) for node in nodes]


def _late(node: Found) -> Remark:
    """Return that no process of ``node`` has answered yet."""
    return Remark(
        node.name,
        f"Ray has started no process there within {_COME_S:g} s",
        "Ray's logs there say why; the node is used once its agent comes",
    )


def _is_known_late(node: Found) -> bool:
    """Return True if ``node`` was late when it was looked for, which people know."""
    return bool(node.name) and node.devices is None


def _not_given(node: Found) -> Remark:
    """Return that Ray has not given ``node`` to gpuslice yet."""
    return Remark(
        node.name,
        f"Ray has not given it to gpuslice within {_COME_S:g} s",
        "`ray status` shows who has its devices; the node is used once its agent comes",
    )


def _remark(node: Found, error: Exception) -> Remark:
    """Return that ``node`` is left out because of ``error``, in a line."""
    if isinstance(error, GpusliceError):
        return Remark.of(node.name, error)
    reason = f"its agent cannot be started by Ray: {last_line(error)}"
    return Remark(node.name, reason, "Ray's logs there say more")


def _is_wanted(wanted: Wanted, node: Found) -> bool:
    return not node.name or node.name not in wanted.without


def _is_ready(wanted: Wanted, node: Found, actor: Any, soon_s: float) -> bool:
    """Wait for the agent that an actor keeps. Return False if another node than the own is late.

    Raises
    ------
    EnvironmentUnusableError
        If Ray does not give the own node, or an agent does not start.
    """
    ready = actor.ready.remote()
    if not ray_module().wait([ready], timeout=_until(soon_s) if node.name else _SAY_S)[0]:
        if node.name:
            return False
        _await_own(node, ready)
    if not result(ready) and node.name:
        raise EnvironmentUnusableError(
            f"the agent of node {node.name} does not start",
            f"{_directory(wanted, node)}/{LOG} there says why",
        )
    return True


def _await_own(node: Found, ready: Any) -> None:
    """Say that Ray has not given the own node yet, and wait for it."""
    sys.stderr.write(
        f"{SAID}waits until Ray gives node {node.ray_name} to gpuslice, at most {_OWN_S:g} s; "
        "`ray status` shows who has its devices\n"
    )
    sys.stderr.flush()
    if not ray_module().wait([ready], timeout=_OWN_S)[0]:
        raise EnvironmentUnusableError(
            f"Ray does not give node {node.ray_name} to gpuslice within {_OWN_S:g} s",
            "`ray status` shows who has its devices; stop them, or share fewer with --devices",
        )


def _begin(wanted: Wanted, node: Found) -> Any:
    """Return the actor that keeps the agent of ``node``. Start it unless it is there."""
    ray = ray_module()
    devices = _devices(wanted, node)
    gpus = sum(device.startswith("cuda") for device in devices)
    cpus = 0
    if devices and not gpus:
        rows = [row["Resources"] for row in ray.nodes() if row["NodeID"] == node.id]
        cpus = rows[0].get("CPU", 0) if rows else 0
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    options = {
        "name": _full_name(wanted, node),
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
    return ray.remote(AgentKeeper).options(**options).remote(directory, _told(wanted, node))


def _devices(wanted: Wanted, node: Found) -> tuple[str, ...]:
    return of_node(node.name, wanted.devices) if node.devices is None else node.devices


def _told(wanted: Wanted, node: Found) -> bytes:
    """Return what the agent of ``node`` is told; nothing for the own node, which has none."""
    return msgspec.json.encode(wanted.agents[node.name]) if node.name else b""


def actor_name(wanted: Wanted, node: Found) -> str:
    """Return what the names of actors of ``node`` begin with. Schedulers of other directories have others."""
    scheduler = blake2b(wanted.directory.encode(), digest_size=4).hexdigest()
    return f"gpuslice-agent-{node.name or node.ray_name}-{scheduler}"


def _full_name(wanted: Wanted, node: Found) -> str:
    """Return the name of the actor of ``node``.

    An actor that was told something else has another name, and so has that of an earlier life of the node:
    Ray may take a while to note the end of that.
    """
    what = __version__, node.id, _devices(wanted, node), _told(wanted, node)
    return f"{actor_name(wanted, node)}-{blake2b(msgspec.json.encode(what), digest_size=4).hexdigest()}"


def actor_names(wanted: Wanted, node: Found) -> list[str]:
    """Return the names of the actors that ``node`` has for the scheduler of ``wanted``: mostly one."""
    present = ray_module().util.list_named_actors(all_namespaces=True)
    names = [one["name"] for one in present if one["namespace"] == NAMESPACE]
    return [name for name in names if name.rpartition("-")[0] == actor_name(wanted, node)]


def _others(wanted: Wanted, nodes: Iterable[Found]) -> list[str]:
    """Return the names of actors of ``nodes`` that are not those that are wanted."""
    return [name for node in nodes for name in actor_names(wanted, node) if name != _full_name(wanted, node)]


def _directory(wanted: Wanted, node: Found) -> str:
    """Return the directory of what gpuslice keeps on ``node``."""
    return f"{wanted.directory}/nodes/{node.name}" if node.name else wanted.directory


def _until(moment_s: float) -> float:
    """Return how long it is until ``moment_s``; 0 if that has passed."""
    return max(0.0, moment_s - time.monotonic())


def _leave(wanted: Wanted, node: Found) -> list[Any]:
    """Have the actors of ``node`` end their agent. Return when that is done, as references."""
    leaving = []
    for name in actor_names(wanted, node):
        with suppress(ValueError):  # it has just ended
            leaving.append(ray_module().get_actor(name, namespace=NAMESPACE).leave.remote())
    return leaving


def _end(names: Sequence[str]) -> None:
    """End actors, and wait until Ray has forgotten their names and what they had."""
    ray = ray_module()
    for name in names:
        with suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
    ends_s = time.monotonic() + _GONE_S
    for name in names:
        with suppress(ValueError):
            while time.monotonic() < ends_s:
                ray.get_actor(name, namespace=NAMESPACE)
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
            ray_module().get_actor(_full_name(wanted, node), namespace=NAMESPACE)
        except ValueError:
            _begin(wanted, node)


def _with_flags(wanted: Wanted, node: Found) -> Node:
    """Return a node with the flags that shipments need: the socket tells schedulers' jobs apart."""
    flags = {"socket": rank_endpoint(Path(_directory(wanted, node)))}
    if not node.name and wanted.ramdisk_dir:
        flags["ramdisk_dir"] = wanted.ramdisk_dir
    return Node(node.id, node.ray_name, flags)
