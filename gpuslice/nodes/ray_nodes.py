"""The parts of Ray that gpuslice needs: the nodes of a cluster, and processes pinned to them.

ray is imported only when a function here needs it. An error of gpuslice in another process is raised here
again; a lost process or node is a ``NodeLostError``.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from gpuslice.errors import EnvironmentUnusableError, GpusliceError, NodeLostError, UsageError

from .receiver import Receiver
from .sender import Sender

#: Least number of digits of a node's id that name it.
_FEWEST_DIGITS = 6
_CONNECT_S = 8.0
#: What Ray's error begins with if the cluster has another version of Ray or Python.
_OTHER_VERSION = "Version mismatch"


class Node(msgspec.Struct, frozen=True):
    """A living node of the cluster.

    Attributes
    ----------
    id
        Ray's.
    name
        As ``ray start --node-name`` gave it, else its address.
    flags
        Settings of gpuslice there that the environment of its raylet does not say.
    """

    id: str
    name: str
    flags: Mapping[str, str] = {}


def ray_module() -> Any:
    """Return the module ray. Raise ``EnvironmentUnusableError`` if it is not installed."""
    try:
        import ray
        import ray.exceptions
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise EnvironmentUnusableError(
            f"Ray cannot be imported: {error}", "install it: pip install 'gpuslice[ray]'"
        ) from error
    return ray


@contextmanager
def connected(address: str | None = None) -> Iterator[None]:
    """Run the block as part of a cluster. A process that belongs to one already stays in it.

    Parameters
    ----------
    address
        ``HOST:PORT`` of the head; by default the cluster that runs on this machine.

    Raises
    ------
    EnvironmentUnusableError
        If there is no Ray or no such cluster, or it goes meanwhile.
    """
    ray = ray_module()
    if ray.is_initialized():
        yield
        return
    if address is not None:
        check_answers(address)
    # Ray would warn about a later version's use of GPUs, which are not requested here.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray.init(address or "auto", namespace="gpuslice", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _no_cluster(address or "this machine", error) from error
    try:
        yield
    except ray.exceptions.RayError as error:
        raise _lost(error) from error
    finally:
        ray.shutdown()


def check_answers(address: str) -> None:
    """Check that a process listens there: Ray itself would wait for minutes. Raises as `connected` does."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"{address} is no address of a Ray cluster", "write it as HOST:PORT")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError as error:
        raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> EnvironmentUnusableError:
    first, *rest = [line.strip() for line in str(error).splitlines()] or [""]
    if first.startswith(_OTHER_VERSION):
        return EnvironmentUnusableError(
            f"the Ray cluster at {address} has another version: {' '.join(filter(None, rest))}",
            "install the same Ray and Python here",
        )
    return EnvironmentUnusableError(
        f"no Ray cluster answers at {address}: {first}",
        "start one with `ray start --head`, or name its head: --ray HOST:PORT",
    )


def nodes() -> list[Node]:
    """Return the living nodes, sorted by name."""
    living = [row for row in ray_module().nodes() if row["Alive"]]
    found = [Node(row["NodeID"], row.get("NodeName") or row["NodeManagerAddress"]) for row in living]
    return sorted(found, key=lambda node: (node.name, node.id))


def find(name: str, flags: Mapping[str, str] | None = None) -> Node:
    """Return the living node with that name or id prefix. ``UsageError`` unless there is exactly one."""
    living = nodes()
    digits = re.fullmatch(rf"[0-9a-f]{{{_FEWEST_DIGITS},}}", name) is not None
    found = [node for node in living if node.name == name or (digits and node.id.startswith(name))]
    if len(found) != 1:
        listed = ", ".join(f"{node.name} ({node.id[: 2 * _FEWEST_DIGITS]})" for node in living)
        what = f"several nodes are called {name}" if found else f"no living node is called {name}"
        raise UsageError(what, f"name one of {listed}, by its name or the digits of its id")
    return msgspec.structs.replace(found[0], flags=dict(flags or {}))


def options_on(node: Node) -> dict[str, Any]:
    """Return Ray's options for a process on exactly that node that takes none of its resources."""
    affinity = ray_module().util.scheduling_strategies.NodeAffinitySchedulingStrategy
    return {"num_cpus": 0, "scheduling_strategy": affinity(node.id, soft=False)}


def actor(kind: type, node: Node, *words: Any, **named: Any) -> Any:
    """Return an object of ``kind`` in a process of its own on that node."""
    return ray_module().remote(kind).options(**options_on(node)).remote(*words, **named)


def call(function: Any, node: Node, *words: Any) -> Any:
    """Call ``function`` in a process on that node, and return or raise what it does."""
    return result(ray_module().remote(function).options(max_retries=0, **options_on(node)).remote(*words))


def result(reference: Any) -> Any:
    """Return the value of a process elsewhere.

    Raises
    ------
    GpusliceError
        What it raised there.
    NodeLostError
        If the process or its node has gone.
    """
    ray = ray_module()
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, GpusliceError):
            raise cause from None
        if isinstance(cause, ray.exceptions.RayError):
            raise _lost(cause) from error
        raise
    except ray.exceptions.RayError as error:
        raise _lost(error) from error


def settle(references: Iterable[Any]) -> None:
    """Wait for results that are no longer needed. Ray would print errors that are never fetched."""
    for reference in references:
        with suppress(GpusliceError, ray_module().exceptions.RayError):
            result(reference)


def _lost(error: Exception) -> NodeLostError:
    first = str(error).partition("\n")[0]
    return NodeLostError(
        f"a node of the cluster has gone, or gpuslice's process on it: {type(error).__name__}: {first}",
        "`ray status` shows the nodes; the same command goes on with what has not arrived",
    )


def end(handle: Any) -> None:
    """End an actor's process. Does nothing if it has ended."""
    ray_module().kill(handle)


class RayCarrier:
    """What moves snapshots between nodes of a cluster; inside ``connected``. See ``shipping.Carrier``."""

    def sender(self, node: Node) -> Any:
        """Return a sender in a process on ``node``."""
        return actor(Sender, node, node.flags)

    def receiver(self, node: Node, *, replace: bool, portion_bytes: int) -> Any:
        """Return a receiver in a process on ``node``."""
        return actor(Receiver, node, node.flags, replace=replace, portion_bytes=portion_bytes)

    def result(self, reference: Any) -> Any:
        """Return or raise what the process elsewhere does, as ``result`` does."""
        return result(reference)

    def settle(self, references: Iterable[Any]) -> None:
        """Wait for results that are no longer needed."""
        settle(references)

    def end(self, handle: Any) -> None:
        """End the process."""
        end(handle)
