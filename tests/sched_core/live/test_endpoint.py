"""Who may come by the local socket: whoever the kernel says is the same user."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from gpuslice.errors import EnvironmentUnusableError, RemoteProtocolError, UsageError
from gpuslice.sched_core.nodes.endpoint import bind, check_sender, host_and_port

from ...patience import PATIENCE_MS


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    found = zmq.Context()
    yield found
    found.destroy(linger=0)


def received(context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes], endpoint: str) -> zmq.Frame:
    """What arrives of a message that this process sends there."""
    with router, context.socket(zmq.DEALER) as dealer:
        dealer.connect(endpoint)
        dealer.send(b"hello")
        assert router.poll(PATIENCE_MS)
        _, frame = router.recv_multipart(copy=False)
        return frame


def test_the_kernel_vouches_for_user_and_process(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = f"ipc://{tmp_path / 'sock'}"
    frame = received(context, bind(context, endpoint), endpoint)
    assert check_sender(frame) == os.getpid()
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)  # the scheduler is somebody else's
    with pytest.raises(RemoteProtocolError, match=f"user {user} may not use this scheduler"):
        check_sender(frame)


def test_what_the_kernel_knows_nothing_of_is_refused(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    router = context.socket(zmq.ROUTER)
    router.bind("inproc://here")
    with pytest.raises(RemoteProtocolError, match="does not vouch"):
        check_sender(received(context, router, "inproc://here"))


def test_a_path_that_is_too_long(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnusableError, match="too long for a socket"):
        bind(context, f"ipc://{tmp_path / ('x' * 120)}")


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("tcp://127.0.0.1:7311", ("127.0.0.1", "7311")),
        ("tcp://[::1]:7311", ("::1", "7311")),
        ("tcp://gpu-box:*", ("gpu-box", "*")),
    ],
)
def test_tcp_endpoints(endpoint: str, address: tuple[str, str]) -> None:
    assert host_and_port(endpoint) == address


@pytest.mark.parametrize(
    "endpoint", ["", "tcp://", "tcp://:1", "tcp://h", "tcp://h:x", "tcp://h:65536", "h:1"]
)
def test_what_is_no_tcp_endpoint(endpoint: str) -> None:
    with pytest.raises(UsageError, match="is no TCP endpoint"):
        host_and_port(endpoint)
