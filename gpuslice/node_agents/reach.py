"""Whether the scheduler can be reached from a node: firewalls between them are found before a job is."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.sched_core.nodes.endpoint import host_and_port

_CONNECT_S = 4.0


def problem(endpoint: str) -> str:
    """Return why nobody answers at ``endpoint``; empty if somebody does."""
    host, port = host_and_port(endpoint)
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError as error:
        return f"{host}:{port}: {error.strerror or error}"
    return ""


def first_reachable(endpoints: Sequence[str]) -> tuple[str, str]:
    """Return the first of ``endpoints`` that answers, or an empty text and why none does."""
    with ThreadPoolExecutor(max(1, len(endpoints))) as threads:
        problems = list(threads.map(problem, endpoints))
    found = next((one for one, why in zip(endpoints, problems, strict=True) if not why), "")
    return found, "" if found else ", ".join(problems)


def unreachable(why: str) -> EnvironmentUnusableError:
    """Return the error of a node that does not reach the scheduler."""
    return EnvironmentUnusableError(
        f"it cannot reach the scheduler at {why}",
        "let TCP through to that port, which --agent-port pins, or name a reachable address: "
        "--agent-port HOST:PORT",
    )
