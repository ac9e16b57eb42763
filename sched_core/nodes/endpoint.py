"""Where a scheduler can be found: a private directory with a lock and local sockets."""

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

#: Names in the scheduler's directory: where users connect, and what says who runs it.
CLIENT_SOCKET = "client.sock"
LOCK = "scheduler.pid"
#: What sockaddr_un can hold, less the final zero.
_MAX_SOCKET_PATH_BYTES = 107
#: No message has more frames, nor more bytes in all of them together.
_MOST_FRAMES = 2
_MUCH_BYTES = 4 * wire.MAX_MESSAGE_BYTES
_MOST_BYTES = wire.MAX_MESSAGE_BYTES + 64


def lock(path: Path) -> int:
    """Hold ``path`` for as long as the returned descriptor is open; write our pid into it.

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
    """Where the jobs' output goes: made in ``directory`` if need be.

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
    """Where what another scheduler wrote in ``directory`` is set aside: the first ``past-N`` that is free."""
    number = 1
    while (past := directory / f"past-{number}").exists():
        number += 1
    return past


def check_path(endpoint: str) -> None:
    """Refuse a local endpoint whose path is too long for a socket.

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
    """A ROUTER socket at ``endpoint`` that only this user can reach.

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
    """A ROUTER socket at ``endpoint`` for those whose keys the context's ``KeyAuthenticator`` accepts.

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
    """Both parts of ``tcp://HOST:PORT``; a port ``*`` is any.

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
    """The next message of a ROUTER socket and, before it, who sent it; ``None`` if there is none yet.

    One of too many frames, or too long altogether, is thrown away frame by frame; then there are none. libzmq
    hands a message over when its last frame is there, so all of it is in memory for a moment.
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
    """Have the C library give free memory back, which it may keep for ever after a message of many frames."""
    with suppress(AttributeError):  # there are C libraries without it
        ctypes.CDLL(None).malloc_trim(0)


def check_sender(frame: zmq.Frame) -> int:
    """The process that sent ``frame``, as the kernel vouches for it (``name:uid:gid:pid``).

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
