"""The line between processes that send and receive snapshots, over the relay at the scheduler's socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from gpuslice.clock import MonotonicClock
from gpuslice.nodes import channel
from gpuslice.nodes.channel import Heard, Line, Ready
from gpuslice.nodes.plan import Config
from gpuslice.sched_core.nodes import curve
from gpuslice.sched_core.nodes.remote_nodes import RemoteNodes

from ...patience import PATIENCE_S


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """How to connect to a scheduler's socket, which relays. A line waits as long as it is told."""
    monkeypatch.setattr(channel, "_ASK_S", PATIENCE_S)
    keys, ours = tmp_path / "keys", tmp_path / "ours"
    curve.make(keys)
    curve.add(keys, "ours", ours)
    remote = RemoteNodes({"": "127.0.0.1"}, "tcp://127.0.0.1:0", keys, MonotonicClock())
    over = threading.Event()

    def relay() -> None:
        poller = zmq.Poller()
        for socket in (remote.socket, remote.authenticator.socket):
            poller.register(socket, zmq.POLLIN)
        while not over.is_set():
            poller.poll(20)
            remote.authenticator.answer()
            remote.receive()

    thread = threading.Thread(target=relay)
    thread.start()
    server, own = curve.client_keys(ours)
    yield Config("", remote.endpoint, server.decode(), own.public.decode(), own.secret.decode())
    over.set()
    thread.join()
    remote.close()


def test_who_is_only_asked_whether_it_is_there_does_not_ask_back(config: Config) -> None:
    with Line(config, "~one") as one, Line(config, "~two") as two:
        two.send("~two", Ready())
        assert two.receive(PATIENCE_S) == Heard("~two", Ready())  # it is connected
        one.send("~two", None)
        one.send("~two", Ready())
        assert two.receive(PATIENCE_S) == Heard("~one", Ready())


def test_who_is_not_there_is_named(config: Config) -> None:
    with Line(config, "~one") as one:
        one.send("~two", None)
        assert one.receive(PATIENCE_S) == Heard("~two", None)
