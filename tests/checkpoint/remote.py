"""The other end of a `swapper.Player`."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..patience import PATIENCE_S


class Remote:
    """A `swapper.Player` at the other end of a socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE_S)
        self._connection = connection
        self._stream = connection.makefile("rw")
        self.pid = int(self.hear())
        self._process = os.pidfd_open(self.pid)

    def tell(self, command: str, **options: object) -> None:
        self._stream.write(json.dumps([command, options]) + "\n")
        self._stream.flush()

    def hear(self) -> Any:
        """What it says next; ``None`` if it died."""
        try:
            line = self._stream.readline()
        except ConnectionResetError:
            return None
        return json.loads(line) if line else None

    def ask(self, command: str, **options: object) -> Any:
        """Its answer to a command that works."""
        self.tell(command, **options)
        return self.result()

    def result(self) -> Any:
        kind, answer = self.hear()
        assert kind == "ok", answer
        return answer

    def kill(self) -> None:
        """And wait until it is gone; harmless if it is."""
        if self._connection.fileno() < 0:
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        assert select.select([self._process], [], [], PATIENCE_S)[0]
        os.close(self._process)
        self._stream.close()
        self._connection.close()

    def go_on(self) -> None:
        """It has said that it is about to stop: let it go on once it has."""
        while self._state() != "T":
            time.sleep(0.01)
        signal.pidfd_send_signal(self._process, signal.SIGCONT)

    def is_waiting(self, seconds: float) -> bool:
        """Whether nothing is heard of it for so long."""
        return not select.select([self._connection], [], [], seconds)[0]

    def _state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
