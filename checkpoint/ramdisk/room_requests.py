"""A parked job's room, for whoever needs it: asked for by a local socket in the job's store.

Only the process itself can take its slots away: it has them mapped, perhaps page-locked, and is the one that
will want them back. So it listens while it is parked, gives up one slot for each that asks, and
answers when the room is free. A socket file whose process died refuses connections, and one that dies
meanwhile ends them; so nobody waits for the dead, and nobody reads a state from a file.
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
#: What is said meanwhile, so that silence means that the process is stopped; and the answers.
_WORKING, _MADE, _NOTHING, _FAILED = b".", b"+", b"-", b"!"
#: How long one that may be busy with another's wish has for its first sign, and then between two.
_FIRST_SIGN_S = 10.0
_SILENCE_S = 120.0
_ANSWER_BYTES = 4096
#: How soon it looks again for those that ask after it could not accept one.
_AGAIN_S = 0.1


class RoomListener:
    """Listens from its making until it is closed; a context manager.

    Forked children, which inherit what it listens at but not its thread, let go of it. ``give`` makes some
    room, unless the function that it is given calls that off; it says whether there was any. ``OSError`` if
    there can be no socket, ``RuntimeError`` if the system gives no more threads.
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
        """Take it back; what is being moved stays, unless it is moved already. Then no thread is at work."""
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
                continue  # the process has no more descriptors; it may have some again
            # A child that is forked meanwhile would keep who asks from hearing of our death, and of the end.
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
        except Exception as error:  # noqa: BLE001 - who asked gets it; the next one may have more luck
            message = error.message if isinstance(error, GpusliceError) else str(error)
            answer = _FAILED + message.encode()[: _ANSWER_BYTES - 1]
        _send(connection, answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _send(connection: socket.socket, data: bytes) -> bool:
    """Whether somebody is there to hear it."""
    try:
        connection.sendall(data, socket.MSG_NOSIGNAL)
    except OSError:
        return False
    return True


def request_room(directory: Path) -> bool:
    """Have the process of the store ``directory`` make some room, and wait until it has; whether it did.

    Not if it does not listen there, has nothing more to give, or wants its slots itself.
    ``RamDiskFullError`` says why it could not.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_FIRST_SIGN_S)
        said = b""
        # Nobody listens there, or it is stopped, has died or has just closed it.
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
