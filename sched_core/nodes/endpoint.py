"""The place of a scheduler: a private directory with a lock and local sockets."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import zmq

from gpuslice import wire
from gpuslice.errors import EnvironmentUnusableError, RemoteProtocolError, UsageError

from .curve import KeyPair

#: Names in the scheduler's directory: the socket for users, and the lock with the scheduler's pid.
CLIENT_SOCKET = "client.sock"
LOCK = "scheduler.pid"
#: Longest path in a sockaddr_un, without the final zero.
_MAX_SOCKET_PATH_BYTES = 107
#: Greatest number of frames of a message, and greatest total of their bytes.
_MOST_FRAMES = 2
_MUCH_BYTES = 4 * wire.MAX_MESSAGE_BYTES
_MOST_BYTES = wire.MAX_MESSAGE_BYTES + 64


def lock(path: Path) -> int:
    """Lock ``path`` and write our pid into it. The lock lasts as long as the returned descriptor is open.

    Raises
    ------
    EnvironmentUnusableError
        If another scheduler holds it, or it is no file of ours.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        what = "is a symbolic link" if error.errno == errno.ELOOP else f"cannot be opened: {error.strerror}"
        raise EnvironmentUnusableError(f"{path} {what}", "remove it, or choose another directory") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        raise EnvironmentUnusableError(
            f"a scheduler (pid {owner}) runs in {path.parent} already", "use it, or choose another directory"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, b"%d\n" % os.getpid())
    return descriptor


def logs_directory(directory: Path) -> Path:
    """Return the directory for the jobs' output. Create it in ``directory`` if it is missing.

    Raises
    ------
    EnvironmentUnusableError
        If something else has its name, such as a link that leads out of the private directory.
    """
    logs = directory / "logs"
    try:
        logs.mkdir()
    except FileExistsError:
        pass
    except OSError as error:
        raise EnvironmentUnusableError(f"cannot make {logs}: {error.strerror}", "make room") from error
    if logs.is_symlink() or not logs.is_dir():
        raise EnvironmentUnusableError(f"{logs} is no directory", "remove it, or choose another directory")
    return logs


def next_past(directory: Path) -> Path:
    """Return the first free ``past-N``, where another scheduler's files in ``directory`` are set aside."""
    number = 1
    while (past := directory / f"past-{number}").exists():
        number += 1
    return past


def check_path(endpoint: str) -> None:
    """Raise ``EnvironmentUnusableError`` if a local endpoint's path is too long for a socket.

    Raises
    ------
    EnvironmentUnusableError
        Naming the path.
    """
    path = endpoint.removeprefix("ipc://")
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise EnvironmentUnusableError(
            f"{path} is too long for a socket ({_MAX_SOCKET_PATH_BYTES} bytes)", "choose a shorter directory"
        )


def bind(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """Return a ROUTER socket at ``endpoint`` that only this user can reach.

    Raises
    ------
    EnvironmentUnusableError
        If the path is too long for a socket.
    """
    check_path(endpoint)
    socket = _router(context)
    # libzmq creates the socket file with the mode that the umask leaves.
    former = os.umask(0o077)
    try:
        socket.bind(endpoint)
    finally:
        os.umask(former)
    return socket


def bind_tcp(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    keys: KeyPair,
    *,
    options: Mapping[zmq.SocketOption, int] = MappingProxyType({}),
) -> zmq.Socket[bytes]:
    """Return a ROUTER socket at ``endpoint`` for clients whose keys the ``KeyAuthenticator`` accepts.

    Raises
    ------
    UsageError
        If it is no TCP endpoint.
    EnvironmentUnusableError
        If it cannot be bound.
    """
    host, _ = host_and_port(endpoint)
    socket = _router(context)
    socket.setsockopt(zmq.IPV6, ":" in host)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, b"gpuslice")
    for option, value in options.items():
        socket.setsockopt(option, value)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise EnvironmentUnusableError(
            f"cannot listen at {endpoint}: {error.strerror}", "choose another address or port"
        ) from error
    return socket


def host_and_port(endpoint: str) -> tuple[str, str]:
    """Return both parts of ``tcp://HOST:PORT``. A port ``*`` stands for any.

    Raises
    ------
    UsageError
        If it is no TCP endpoint.
    """
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if scheme != "tcp" or not host or not (port == "*" or _is_port(port)):
        raise UsageError(f"{endpoint!r} is no TCP endpoint", "write for instance tcp://127.0.0.1:7311")
    return host.strip("[]"), port


def _is_port(text: str) -> bool:
    return re.fullmatch("[0-9]{1,5}", text) is not None and int(text) < 1 << 16


def _router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
    return socket


def receive(socket: zmq.Socket[bytes]) -> tuple[bytes, list[zmq.Frame]] | None:
    """Return the sender and frames of a ROUTER socket's next message; None if there is none yet.

    A message of too many frames, or too long altogether, is dropped frame by frame; then the list of frames
    is empty. libzmq delivers a message when its last frame is there, so all of it is in memory for a moment.
    """
    try:
        identity = socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None
    frame = socket.recv(copy=False)
    frames, nbytes, more = [frame], len(frame), frame.more
    while more:
        frame = socket.recv(copy=False)
        nbytes, more = nbytes + len(frame), frame.more
        if frames:
            frames.append(frame)
        if len(frames) > _MOST_FRAMES or nbytes > _MOST_BYTES:
            frames = []
    if nbytes > _MUCH_BYTES:
        del frame
        _give_back()
    return identity, frames


def _give_back() -> None:
    """Make the C library return free memory to the system, which it would keep after a long message."""
    with suppress(AttributeError):  # there are C libraries without it
        ctypes.CDLL(None).malloc_trim(0)


def check_sender(frame: zmq.Frame) -> int:
    """Return the process that sent ``frame``, as the kernel certifies it (``name:uid:gid:pid``).

    Raises
    ------
    RemoteProtocolError
        If it is not ours.
    """
    try:
        user, _, process = str(frame.get("Peer-Address")).rsplit(":", 3)[1:]
        uid, pid = int(user), int(process)
    except (zmq.ZMQError, ValueError) as error:
        raise RemoteProtocolError("the kernel does not vouch for the sender", "connect by ipc") from error
    if uid != os.getuid():
        raise RemoteProtocolError(f"user {uid} may not use this scheduler", "start one of your own")
    return pid
