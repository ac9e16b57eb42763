"""What is said if ssh, or the program that it starts on a machine, fails; and what ``--node`` may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuslice.errors import EnvironmentUnusableError, UsageError
from gpuslice.node_agents import ssh
from gpuslice.nodes.plan import Host

HOST = Host("b", "ann@10.0.0.6", "/opt/python")


@pytest.mark.parametrize(
    ("code", "said", "message", "remedy"),
    [
        (
            255,
            "ann@10.0.0.6: Permission denied (publickey).",
            "ssh cannot log in to ann@10.0.0.6: .*Permission denied",
            "`ssh -o BatchMode=yes ann@10.0.0.6 true` must work without a question",
        ),
        (
            127,
            "sh: 1: exec: /opt/python: not found",
            "there is no Python /opt/python on ann@10.0.0.6",
            "name one that has gpuslice: --node b=ann@10.0.0.6:/path/to/python",
        ),
        (
            1,
            "/opt/python: No module named gpuslice.node_agents",
            "/opt/python on ann@10.0.0.6 has no gpuslice",
            "install it there, or name a Python that has it: --node b=ann@10.0.0.6:/path/to/python",
        ),
        (1, "MemoryError", "gpuslice fails on ann@10.0.0.6: MemoryError", "see what it says there"),
        (0, "Welcome", "gpuslice fails on ann@10.0.0.6: Welcome", "see what it says there"),
    ],
)
def test_why_a_machine_cannot_be_used_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str, message: str, remedy: str
) -> None:
    command = tmp_path / "ssh"
    command.write_text(f"#!/bin/sh\ncat >/dev/null\necho '{said}' >&2\nexit {code}\n")
    command.chmod(0o700)
    monkeypatch.setenv(ssh.COMMAND, str(command))
    with pytest.raises(EnvironmentUnusableError, match=message) as found:
        ssh.run(HOST, "find", b"{}")
    assert found.value.remedy == remedy


def test_a_command_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ssh.COMMAND, "/no/such/ssh")
    with pytest.raises(EnvironmentUnusableError, match="/no/such/ssh cannot be started"):
        ssh.run(HOST, "find", b"{}")


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("b=10.0.0.6", Host("b", "10.0.0.6")),
        ("b=ann@gpu3:/opt/venv/bin/python", Host("b", "ann@gpu3", "/opt/venv/bin/python")),
        ("b=gpu3:~/venv/bin/python", Host("b", "gpu3", "~/venv/bin/python")),
    ],
)
def test_a_node_is_a_name_a_machine_and_a_python(text: str, host: Host) -> None:
    assert ssh.parse_host(text) == host


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu3", "names no node"),
        ("here=gpu3", "names no node"),
        ("a/b=gpu3", "names no node"),
        ("b=", "names no machine"),
        ("b=-oProxyCommand=x", "names no machine"),
        ("b=gpu3:2222", "is a Python, not a port"),
        ("b=gpu3:/opt/py thon", "is no path of a Python"),
    ],
)
def test_what_is_no_node_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ssh.parse_host(text)
