"""The link that a move is compared with: how many bytes a second pass one encrypted connection."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import zmq

from gpuslice.sched_core.nodes.relay import PART_BYTES

_PARTS = 128


def link_bytes_per_s() -> float:
    """Return the rate of one CURVE connection on the loopback device, as an agent has it to the scheduler."""
    with _connection() as (receiver, sender):
        part = bytes(PART_BYTES)
        sender.send(part)
        receiver.recv()  # connected
        thread = Thread(target=lambda: [sender.send(part, copy=False) for _ in range(_PARTS)])
        began_s = time.monotonic()
        thread.start()
        for _ in range(_PARTS):
            receiver.recv(copy=False)
        took_s = time.monotonic() - began_s
        thread.join()
    return _PARTS * PART_BYTES / took_s


@contextmanager
def _connection() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Connect two sockets, each with an I/O thread of its own."""
    (server, server_secret), (client, client_secret) = zmq.curve_keypair(), zmq.curve_keypair()
    with zmq.Context() as there, zmq.Context() as here, there.socket(zmq.PULL) as receiver:
        receiver.setsockopt(zmq.CURVE_SERVER, 1)
        receiver.setsockopt(zmq.CURVE_SECRETKEY, server_secret)
        port = receiver.bind_to_random_port("tcp://127.0.0.1")
        with here.socket(zmq.PUSH) as sender:
            sender.setsockopt(zmq.CURVE_SERVERKEY, server)
            sender.setsockopt(zmq.CURVE_PUBLICKEY, client)
            sender.setsockopt(zmq.CURVE_SECRETKEY, client_secret)
            sender.connect(f"tcp://127.0.0.1:{port}")
            yield receiver, sender
