"""Users come by TCP: with a key that is accepted, and in no other way. Real sockets, real keys."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from gpuslice import verbs
from gpuslice.client.client import Client
from gpuslice.errors import EnvironmentUnusableError, UsageError
from gpuslice.sched_core.nodes import curve

from ..patience import PATIENCE_MS, PATIENCE_S
from .conftest import Shell


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    curve.make(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def endpoint(shell: Shell, keys: Path) -> Iterator[str]:
    """Of a scheduler that listens at any free port."""
    shell.up("--bind", "tcp://127.0.0.1:*", "--curve-keys", str(keys))
    local, found = shell.status().endpoints
    assert local.startswith("ipc://")
    assert found.startswith("tcp://127.0.0.1:")
    yield found
    shell("down")


def remote(endpoint: str, keys: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command line of somebody who knows the scheduler by the environment only."""
    environ = {name: value for name, value in os.environ.items() if name != "GPUSLICE_STATE_DIR"}
    return subprocess.run(
        [sys.executable, "-m", "gpuslice", *words],
        env={**environ, "GPUSLICE_CONNECT": endpoint, "GPUSLICE_CURVE_KEYS": str(keys)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_with_the_right_key_everything_works(shell: Shell, endpoint: str, keys: Path) -> None:
    done = remote(endpoint, keys, "submit", "--name", "far", "--", "echo", "hello")
    assert (done.returncode, done.stdout) == (0, "far\n"), done.stderr
    assert remote(endpoint, keys, "wait", "far", "--timeout", "60s").returncode == 0
    assert remote(endpoint, keys, "logs", "far", "-f").stdout == "hello\n"
    named = shell("--connect", endpoint, "--curve-keys", str(keys), "ps")
    assert named == shell("ps")
    with Client(connect=endpoint, curve_keys=keys) as client:
        assert [job.id for job in client.jobs()] == ["far"]
        with pytest.raises(UsageError, match="no job 'near'"):
            client.cancel("near")


def test_an_unknown_key_is_refused_until_it_is_accepted(endpoint: str, keys: Path, tmp_path: Path) -> None:
    curve.make(tmp_path / "other")
    (tmp_path / "other" / "scheduler.public").write_bytes((keys / "scheduler.public").read_bytes())
    with Client(connect=endpoint, curve_keys=tmp_path / "other") as stranger:
        with pytest.raises(EnvironmentUnusableError, match="refuses this key") as refusal:
            stranger.jobs()
        assert "keys add" in refusal.value.remedy
        accepted = keys / "accepted" / "friend.public"
        accepted.touch(0o600)
        accepted.write_bytes((tmp_path / "other" / "client.public").read_bytes())
        assert stranger.jobs() == []
        accepted.unlink()
        with pytest.raises(EnvironmentUnusableError, match="refuses this key"):
            stranger.jobs()


def test_keys_for_a_second_client(shell: Shell, endpoint: str, keys: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shell("keys", "add", str(keys), "ann", str(out))
    assert not (out / "scheduler.secret").exists()
    with Client(connect=endpoint, curve_keys=out) as client:
        assert client.jobs() == []
    assert "exists" in shell("keys", "add", str(keys), "ann", str(tmp_path / "more"), code=2)
    assert "is no name" in shell("keys", "add", str(keys), "../x", str(tmp_path / "more"), code=2)


def test_the_key_of_another_scheduler_is_noticed(endpoint: str, tmp_path: Path) -> None:
    curve.make(tmp_path / "other")
    with (
        Client(connect=endpoint, curve_keys=tmp_path / "other") as client,
        pytest.raises(EnvironmentUnusableError, match="is not the scheduler"),
    ):
        client.jobs()


def test_without_a_key_nobody_is_heard(shell: Shell, endpoint: str) -> None:
    context = zmq.Context()
    with context, context.socket(zmq.DEALER) as plain:
        plain.setsockopt(zmq.LINGER, 0)
        monitor = plain.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
        )
        plain.connect(endpoint)
        plain.send_multipart(verbs.encode(verbs.Down()))
        assert monitor.poll(PATIENCE_MS)
        assert int.from_bytes(monitor.recv_multipart()[0][:2], "little") != zmq.EVENT_HANDSHAKE_SUCCEEDED
        assert not plain.poll(0)
        plain.disable_monitor()
        monitor.close()
    assert shell.status().jobs == (), "it was not taken down"


def test_another_version_of_the_protocol_gets_a_clear_answer(endpoint: str, keys: Path) -> None:
    scheduler, own = curve.client_keys(keys)
    context = zmq.Context()
    with context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.curve_serverkey = scheduler
        dealer.curve_publickey, dealer.curve_secretkey = own.public, own.secret
        dealer.connect(endpoint)
        dealer.send_multipart([b"99", verbs.encode(verbs.Status())[1]])
        assert dealer.poll(PATIENCE_MS)
        answer = verbs.decode_answer(dealer.recv_multipart())
    assert isinstance(answer, verbs.Failed)
    assert answer.error == "protocol version b'99' is not b'1'"
    assert answer.remedy == "run the same gpuslice on both sides"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--bind", "tcp://127.0.0.1:7311"], "needs keys"),
        (["--curve-keys", "KEYS"], "without --bind"),
        (["--bind", "127.0.0.1", "--curve-keys", "KEYS"], "is no TCP endpoint"),
        (["--bind", "tcp://127.0.0.1:70000", "--curve-keys", "KEYS"], "is no TCP endpoint"),
        (["--bind", "tcp://127.0.0.1:7311", "--curve-keys", "nowhere"], "cannot read the key"),
    ],
)
def test_tcp_without_the_right_keys_is_refused_before_anything_starts(
    shell: Shell, keys: Path, words: list[str], why: str
) -> None:
    given = [str(keys) if word == "KEYS" else word for word in words]
    assert why in shell("up", "--devices", "null:1", *given, code=2)


def test_an_address_that_cannot_be_had(shell: Shell, keys: Path) -> None:
    context = zmq.Context()
    with context, context.socket(zmq.ROUTER) as taken:
        taken.bind("tcp://127.0.0.1:*")
        endpoint = taken.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        words = ("--bind", endpoint, "--curve-keys", str(keys))
        assert "cannot listen at" in shell("up", "--devices", "null:1", *words, code=3)


def test_clients_without_keys_or_a_scheduler(keys: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs keys"):
        Client(connect="tcp://127.0.0.1:1")
    with pytest.raises(UsageError, match="both"):
        Client(tmp_path, connect="tcp://127.0.0.1:1", curve_keys=keys)
    with pytest.raises(UsageError, match="is no TCP endpoint"):
        Client(connect="ipc:///tmp/x", curve_keys=keys)
    with (
        Client(connect="tcp://127.0.0.1:1", curve_keys=keys) as client,
        pytest.raises(EnvironmentUnusableError, match="no scheduler listens"),
    ):
        client.jobs()


def test_secrets_are_for_their_owner_only(shell: Shell, tmp_path: Path) -> None:
    keys = tmp_path / "fresh"
    shell("keys", "new", str(keys))
    for path in (keys, *keys.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert "cannot make" in shell("keys", "new", str(keys), code=2)
    (keys / "client.secret").chmod(0o640)
    assert "chmod 600" in shell("--connect", "tcp://127.0.0.1:1", "--curve-keys", str(keys), "ps", code=2)
    (keys / "client.secret").chmod(0o600)
    keys.chmod(0o755)
    assert "chmod 700" in shell("--connect", "tcp://127.0.0.1:1", "--curve-keys", str(keys), "ps", code=2)
