"""Two nodes on one machine: a process that reads a job's newest snapshot, and one that writes it elsewhere.

They do what the actors of ``gpuslice.nodes.shipping`` do, by TCP on the loopback device instead of Ray's
object stores. ``python -m benchmarks.migration_latency.other_node send RAMDISK`` says its port, and serves
whoever connects. ``... receive RAMDISK LIMIT PORT`` reads lines: to ``fetch`` it answers by the snapshots'
paths, rank by rank, and to ``forget`` by none, when it has removed them.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from multiprocessing.connection import Client, Connection, Listener

from gpuslice.checkpoint.ramdisk.listing import restartable_files
from gpuslice.nodes.messages import Held, Missing, decode, encode
from gpuslice.nodes.receiver import Receiver
from gpuslice.nodes.sender import Sender, open_disk

#: As ``gpuslice.nodes.shipping`` has it.
UNDER_WAY = 4
JOB = "bench"
#: What is asked of the sender, before the message.
BEGIN, OFFER, PORTION = b"b", b"o", b"p"


def send(ramdisk: str) -> None:
    """Answer what is asked, until the other end is gone."""
    with Listener(("127.0.0.1", 0)) as listener:
        print(listener.address[1], flush=True)
        with listener.accept() as connection:
            while True:
                try:
                    asked = connection.recv_bytes()
                except EOFError:
                    return
                verb, message = asked[:1], asked[1:]
                if verb == BEGIN:
                    sender = Sender({"ramdisk_dir": ramdisk})
                    connection.send_bytes(sender.begin(message.decode()))
                elif verb == OFFER:
                    connection.send_bytes(sender.offer(int(message)))
                else:
                    connection.send_bytes(sender.portion(message))


class Fetching:
    """One shipment of a job, as its receiving end sees it."""

    def __init__(self, connection: Connection, flags: dict[str, str]) -> None:
        self._connection, self._flags = connection, flags
        self._receiver = Receiver(flags)

    def fetch(self) -> list[str]:
        """The paths of the snapshots, when all are published."""
        held = decode(self._ask(BEGIN + JOB.encode()), Held)
        offers = [self._ask(OFFER + str(rank).encode()) for rank in held.ranks]
        self._fetch(decode(self._receiver.receive(*offers), Missing))
        self._receiver.publish()
        disk = open_disk(self._flags)
        return [str(restartable_files(disk.home(JOB, rank))[held.boundary]) for rank in held.ranks]

    def _fetch(self, missing: Missing) -> None:
        under_way: deque[bytes] = deque()
        for portion in map(encode, missing.portions):
            if len(under_way) == UNDER_WAY:
                self._put(under_way.popleft())
            under_way.append(portion)
            self._connection.send_bytes(PORTION + portion)
        while under_way:
            self._put(under_way.popleft())

    def _put(self, portion: bytes) -> None:
        self._receiver.put(portion, self._connection.recv_bytes())

    def _ask(self, message: bytes) -> bytes:
        self._connection.send_bytes(message)
        return self._connection.recv_bytes()


def forget(flags: dict[str, str]) -> list[str]:
    """Remove all snapshots: a job comes to a node that has none of it."""
    disk = open_disk(flags)
    for info in disk.listing():
        disk.open_store(JOB, info.rank).close(keep=False)
    return []


def receive(ramdisk: str, limit: str, port: int) -> None:
    """Do what the lines say."""
    flags = {"ramdisk_dir": ramdisk, "ramdisk_limit": limit}
    with Client(("127.0.0.1", port)) as connection:
        print("ready", flush=True)
        for line in sys.stdin:
            found = Fetching(connection, flags).fetch() if line.strip() == "fetch" else forget(flags)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    role, directory, *rest = sys.argv[1:]
    if role == "send":
        send(directory)
    else:
        receive(directory, rest[0], int(rest[1]))
