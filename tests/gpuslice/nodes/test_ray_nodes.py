"""Without Ray: nothing imports it unasked, and who asks is told what to do."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from gpuslice.errors import EnvironmentUnusableError, NodeLostError, UsageError
from gpuslice.nodes import ray_nodes
from gpuslice.nodes.ray_nodes import Node
from gpuslice.nodes.replication import Replication


def test_nothing_imports_ray_unasked() -> None:
    code = (
        "import sys, gpuslice.nodes.shipping, gpuslice.nodes.replication, gpuslice.cli.ship\n"
        "sys.exit('ray' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_command_without_ray_says_how_to_get_it() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from gpuslice.cli import main; main(['ship', 'mnist', '--to', 'b'])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == "gpuslice: install it: pip install 'gpuslice[ray]'"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("address", ["", "host", "host:port", ":6379", "127.0.0.1"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        ray_nodes.check_answers(address)


def test_a_snapshot_is_due_when_an_nth_one_was_taken() -> None:
    replication = Replication("job", Node("1", "a"), Node("2", "b"), every=3)
    assert [number for number in range(8) if replication.is_due(number)] == [3, 4, 5, 6, 7]
    with pytest.raises(UsageError, match="0th"):
        Replication("job", Node("1", "a"), Node("2", "b"), every=0)


def test_a_cluster_of_another_version_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*words: object, **named: object) -> None:
        raise RuntimeError(
            "Version mismatch: The cluster was started with:\n    Ray: 2.9.3\n    Python: 3.11.7\n"
            "This process on node 10.0.0.5 was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
        )

    ray = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setattr(ray_nodes, "ray_module", lambda: ray)
    with pytest.raises(
        EnvironmentUnusableError, match=r"another version: Ray: 2\.9\.3 .* Ray: 2\.60\.0"
    ) as found:
        ray_nodes.connected().__enter__()
    assert found.value.remedy == "install the same Ray and Python here"


def test_a_cluster_that_goes_meanwhile_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class RayError(Exception):
        pass

    ended = []
    ray = SimpleNamespace(
        is_initialized=lambda: False,
        init=lambda *words, **named: None,
        shutdown=lambda: ended.append(True),
        exceptions=SimpleNamespace(RayError=RayError),
    )
    monkeypatch.setattr(ray_nodes, "ray_module", lambda: ray)
    with pytest.raises(NodeLostError, match="RayError: its head was killed"), ray_nodes.connected():
        raise RayError("its head was killed\nand more")
    assert ended == [True]
