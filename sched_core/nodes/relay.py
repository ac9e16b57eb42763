"""The relay between processes that send snapshots from node to node, at the socket of the nodes' agents.

Such a process connects as an agent does, with the agents' keys, and as ``~...``. It sends two frames or more:
to whom, and what. To a node: a process for it is to be started there. To another such process: that is passed
on, with the sender in place of the receiver. To nobody: it comes back. What cannot be delivered comes back
without content. So everybody notices who has gone, and nodes need no port that anybody can connect to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import zmq

#: What the identity of such a process begins with; a node's name does not.
MARK = b"~"
#: A part of a message is not larger than this.
PART_BYTES = 1 << 20


class Relay:
    """Passes messages on.

    Parameters
    ----------
    socket
        Of all of them.
    serve
        Called with a node's name and a channel, for a process of that channel to be started there. Returns
        False if there is no such node now.
    """

    def __init__(self, socket: zmq.Socket[bytes], serve: Callable[[str, str], bool]) -> None:
        self._socket = socket
        self._serve = serve

    def take(self, sender: bytes, frames: Sequence[zmq.Frame]) -> None:
        """Handle a message of ``sender``."""
        to, *parts = frames
        receiver = to.bytes
        if not receiver:
            self._send(sender, [b""])
        elif not receiver.startswith(MARK):
            channel = b"".join(part.bytes for part in parts).decode(errors="replace")
            if not self._serve(receiver.decode(errors="replace"), channel):
                self._send(sender, [receiver])
        elif not self._send(receiver, [sender, *parts]):
            self._send(sender, [receiver])

    def _send(self, receiver: bytes, frames: Sequence[bytes | zmq.Frame]) -> bool:
        """Return True if ``receiver`` is connected."""
        try:
            self._socket.send_multipart([receiver, *frames], flags=zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True
