"""Whether the scheduler can be reached from a node, and what is said if it cannot."""

from __future__ import annotations

import socket

from gpuslice.node_agents.reach import first_reachable, problem, unreachable


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_first_address_is_taken_at_which_somebody_answers() -> None:
    closed = f"tcp://127.0.0.1:{free_port()}"
    with socket.create_server(("127.0.0.1", 0)) as server:
        answers = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert problem(answers) == ""
        assert first_reachable([closed, answers]) == (answers, "")


def test_a_port_at_which_nobody_answers_is_named_with_what_to_do() -> None:
    ports = [free_port(), free_port()]
    found, why = first_reachable([f"tcp://127.0.0.1:{port}" for port in ports])
    assert found == ""
    assert all(f"127.0.0.1:{port}: Connection refused" in why for port in ports)
    error = unreachable(why)
    assert why in error.message
    assert "--agent-port" in error.remedy


def test_nowhere_to_look_is_nowhere_reachable() -> None:
    assert first_reachable([]) == ("", "")
