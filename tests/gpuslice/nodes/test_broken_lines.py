"""A shipment whose connection breaks and returns at once goes on: what was on its way is sent again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from gpuslice.clock import MonotonicClock
from gpuslice.nodes.end_process import Order, serve
from gpuslice.nodes.plan import Config
from gpuslice.nodes.ray_nodes import Node
from gpuslice.nodes.relay_carrier import RelayCarrier
from gpuslice.nodes.shipping import ship
from gpuslice.sched_core.nodes import curve
from gpuslice.sched_core.nodes.endpoint import host_and_port
from gpuslice.sched_core.nodes.relay import Relay
from gpuslice.sched_core.nodes.remote_nodes import RemoteNodes

from ...sched_core.live.proxy import Proxy
from .synthetic import found, storages, take

HERE, THERE = Node("", "here"), Node("b", "b")


class Scheduler:
    """A relay. Who asks and the end on node b, a thread, connect to it by a proxy each."""

    def __init__(self, directory: Path) -> None:
        keys, ours = directory / "keys", directory / "ours"
        curve.make(keys)
        curve.add(keys, "ours", ours)
        self._remote = RemoteNodes({"": "127.0.0.1"}, "tcp://127.0.0.1:0", keys, MonotonicClock())
        self._remote._relay = Relay(self._remote.socket, self._serve)
        port = int(host_and_port(self._remote.endpoint)[1])
        self.proxies = {"caller": Proxy(port), "end": Proxy(port)}
        server, own = curve.client_keys(ours)
        told = server.decode(), own.public.decode(), own.secret.decode()
        self.config = Config("", f"tcp://127.0.0.1:{self.proxies['caller'].port}", *told)
        endpoint = f"tcp://127.0.0.1:{self.proxies['end'].port}"
        self._theirs = msgspec.structs.replace(self.config, name="b", endpoint=endpoint)
        self._directory = directory
        self._over = threading.Event()
        self._ends: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._relay)
        self._thread.start()

    def _serve(self, node: str, channel: str) -> bool:
        order = Order(channel, self._theirs, str(self._directory))
        self._ends.append(threading.Thread(target=serve, args=(order,)))
        self._ends[-1].start()
        return True

    def _relay(self) -> None:
        poller = zmq.Poller()
        for socket in (self._remote.socket, self._remote.authenticator.socket):
            poller.register(socket, zmq.POLLIN)
        while not self._over.is_set():
            poller.poll(20)
            self._remote.authenticator.answer()
            self._remote.receive()

    def close(self) -> None:
        """Wait until no end is left, which notice that nobody asks any more."""
        for thread in self._ends:
            thread.join()
        self._over.set()
        self._thread.join()
        for proxy in self.proxies.values():
            proxy.close()
        self._remote.close()


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Scheduler]:
    made = Scheduler(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("whose", ["caller", "end"])
@pytest.mark.parametrize("there", [True, False])
def test_a_shipment_goes_on_after_its_connection(
    there: bool, whose: str, scheduler: Scheduler, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, theirs = shm / "own", shm / "b"
    monkeypatch.setenv("GPUSLICE_RAMDISK_DIR", str(theirs))
    source, target = (HERE, THERE) if there else (THERE, HERE)
    contents = [storages(0, (3_000_000,))]
    take(own if there else theirs, "mine", 4, contents)
    with RelayCarrier(scheduler.config, {"ramdisk_dir": str(own)}) as carrier:
        scheduler.proxies[whose].lose_next()
        ship("mine", source, target, carrier=carrier)
    assert found(theirs if there else own, "mine", 4, 0) == contents[0]
    assert not scheduler.proxies[whose]._loses_next
