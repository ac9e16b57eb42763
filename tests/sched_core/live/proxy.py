"""A TCP proxy between an agent and its scheduler, which can lose the connection or keep what is sent."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress

_BYTES = 1 << 16
#: More than a handshake, a question or an answer without a snapshot has.
_LARGE_BYTES = 1 << 14
_LOOK_AGAIN_S = 0.05


class Proxy:
    """Forwards between whoever connects to ``port`` and ``target``, unless the line is cut or held."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._is_cut = self._is_held = self._is_over = self._loses_next = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def cut(self) -> None:
        """End all connections, and every new one at once."""
        with self._lock:
            self._is_cut = True
            for one in list(self._pairs):
                self._close(one)

    def hold(self) -> None:
        """Forward nothing; connections stay."""
        with self._lock:
            self._is_held = True

    def lose_next(self) -> None:
        """Lose what is sent next, if it is large, with the connection. A new connection is forwarded."""
        with self._lock:
            self._loses_next = True

    def mend(self) -> None:
        """Forward as before, what was held first."""
        with self._lock:
            self._is_cut = self._is_held = False

    def close(self) -> None:
        """End it."""
        self._is_over = True
        self._thread.join()
        self.cut()
        self._listener.close()

    def _serve(self) -> None:
        while not self._is_over:
            with self._lock:
                waiting = [self._listener, *(() if self._is_held else self._pairs)]
            for one in select.select(waiting, [], [], _LOOK_AGAIN_S)[0]:
                with self._lock:
                    self._take(one)

    def _take(self, one: socket.socket) -> None:
        if one is self._listener:
            near, _ = self._listener.accept()
            far = None if self._is_cut else self._reach_target()
            if far is None:
                near.close()
            else:
                self._pairs |= {near: far, far: near}
        elif one in self._pairs and not self._is_held:
            try:
                data = one.recv(_BYTES)
                if self._loses_next and len(data) >= _LARGE_BYTES:
                    self._loses_next, data = False, b""
                self._pairs[one].sendall(data)
            except OSError:
                data = b""
            if not data:
                self._close(one)

    def _reach_target(self) -> socket.socket | None:
        with suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", self._target))
        return None

    def _close(self, one: socket.socket) -> None:
        if (other := self._pairs.pop(one, None)) is not None:
            self._pairs.pop(other, None)
            one.close()
            other.close()
