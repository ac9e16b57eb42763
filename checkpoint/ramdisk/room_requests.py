"""Requests for a parked job's room, by a local socket in the job's store.

Only the process itself can give up its slots: it has them mapped, perhaps page-locked, and will want them
back. So it listens while it is parked, gives up one slot per request, and answers when the room is free. The
socket of a dead process refuses connections, and a process that dies meanwhile ends them. So no request waits
for a dead process, and no state is read from a file.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from gpuslice.checkpoint.files import closed_in_children, listen, short_path
from gpuslice.checkpoint.gate import OWN_PREFIX
from gpuslice.errors import GpusliceError, RamDiskFullError

from .spill import Interrupted, Pause

SOCKET = "room"
#: Bytes sent while at work, so that silence means a stopped process; and the answers.
_WORKING, _MADE, _NOTHING, _FAILED = b".", b"+", b"-", b"!"
#: Longest wait for the first byte, while the process may serve another request, and between two bytes.
_FIRST_SIGN_S = 10.0
_SILENCE_S = 120.0
_ANSWER_BYTES = 4096
#: Pause after a connection that could not be accepted.
_AGAIN_S = 0.1


class RoomListener:
    """A thread that answers other processes' requests for room, until it is closed; a context manager.

    Forked children close their copy of the socket. ``give`` makes some room and returns True if there was
    any; the function that it is given raises to interrupt it. ``OSError`` if there can be no socket,
    ``RuntimeError`` if the system gives no more threads.
    """

    def __init__(self, path: Path, give: Callable[[Pause], bool]) -> None:
        self._path = path
        self._give = give
        self._closing = threading.Event()
        self._listener = listen(path)
        self._thread = threading.Thread(target=self._serve, name=f"{OWN_PREFIX}room", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._path.unlink(missing_ok=True)
            self._listener.close()
            raise

    def close(self) -> None:
        """Stop listening, and wait for the thread. A move under way is called off unless it is complete."""
        if self._listener.fileno() < 0:
            return
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._path.unlink(missing_ok=True)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closing.wait(_AGAIN_S):
                    return
                continue  # the process has no more descriptors at present
            # A child forked meanwhile would keep the connection open after our death, or after the answer.
            closed_in_children(connection, socket.socket.close)
            with connection:
                self._answer(connection)
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, connection: socket.socket) -> None:
        def pause() -> None:
            if self._closing.is_set() or not _send(connection, _WORKING):
                raise Interrupted

        connection.settimeout(_FIRST_SIGN_S)
        try:
            pause()
            answer = _MADE if self._give(pause) else _NOTHING
        except Interrupted:
            answer = _NOTHING
        except Exception as error:  # noqa: BLE001 - the error is sent to the requesting process
            message = error.message if isinstance(error, GpusliceError) else str(error)
            answer = _FAILED + message.encode()[: _ANSWER_BYTES - 1]
        _send(connection, answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _send(connection: socket.socket, data: bytes) -> bool:
    """Send data. Return False if the connection is closed."""
    try:
        connection.sendall(data, socket.MSG_NOSIGNAL)
    except OSError:
        return False
    return True


def request_room(directory: Path) -> bool:
    """Ask the process of the store ``directory`` for room, and wait. Return True if it made some.

    Return False if it does not listen, has nothing more to give, or wants its slots itself.
    ``RamDiskFullError`` says why it failed.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_FIRST_SIGN_S)
        said = b""
        # No process listens there, or it is stopped, has died or has just closed the socket.
        with suppress(OSError):
            with short_path(directory / SOCKET) as address:
                connection.connect(address)
            while data := connection.recv(_ANSWER_BYTES):
                connection.settimeout(_SILENCE_S)
                said += data
    answer = said.lstrip(_WORKING)
    if answer.startswith(_FAILED):
        raise RamDiskFullError(
            f"there is no room, and {directory.name} could make none: {answer[1:].decode(errors='replace')}",
            "make room in the spill directory, or raise --ramdisk-limit",
        )
    return answer == _MADE
