"""How a client reaches its scheduler: by the local socket of a state directory, or by TCP with CURVE keys."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

import zmq

from gpuslice import config
from gpuslice.errors import EnvironmentUnusableError, NoSchedulerError, UsageError
from gpuslice.files import closed_directory
from gpuslice.sched_core.nodes import curve
from gpuslice.sched_core.nodes.endpoint import CLIENT_SOCKET, LOCK, host_and_port

#: Environment variables for those who do not name a scheduler otherwise.
CONNECT, CURVE_KEYS = "GPUSLICE_CONNECT", "GPUSLICE_CURVE_KEYS"
_PROBE_S = 5.0
#: What the kernel knows of a local socket's other side: pid, uid, gid.
_UCRED = struct.Struct("3i")
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_FAILED |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class Connection(Protocol):
    """How a client reaches one scheduler."""

    @property
    def directory(self) -> Path | None:
        """The state directory of the scheduler. None if it is reached by TCP."""
        ...

    def connect_to(self, dealer: zmq.Socket[bytes]) -> None:
        """Connect ``dealer``. Return at once, also if no scheduler is there."""
        ...

    def release(self, dealer: zmq.Socket[bytes]) -> None:
        """Free what ``connect_to`` has opened. To be called before ``dealer`` is closed."""
        ...

    def check_listener(self) -> None:
        """Raise ``EnvironmentUnusableError`` if no scheduler listens. ZeroMQ would wait for one."""
        ...

    def wait_answer(self, dealer: zmq.Socket[bytes], wait_ms: int) -> bool:
        """Wait up to ``wait_ms`` for an answer. Return True if one can be read."""
        ...

    def awaiting_exit(self) -> AbstractContextManager[None]:
        """Return a context that waits, at its end, until the scheduler's process has ended.

        By TCP that cannot be seen, and nothing is waited for.
        """
        ...


class LocalConnection:
    """The sockets of a state directory. The kernel says which user is on the other side."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def directory(self) -> Path:
        return self._directory

    def connect_to(self, dealer: zmq.Socket[bytes]) -> None:
        dealer.connect(f"ipc://{self._directory / CLIENT_SOCKET}")

    def release(self, dealer: zmq.Socket[bytes]) -> None:
        """Do nothing: nothing has been opened."""

    def check_listener(self) -> None:
        self._listener_pid()

    def _listener_pid(self) -> int:
        """Return the process that listens, or 0 if it is in another PID namespace."""
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self._directory / CLIENT_SOCKET))
            except OSError as error:
                raise self._nobody(error) from error
            pid: int
            pid, _, _ = _UCRED.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            return pid

    def _nobody(self, error: OSError) -> EnvironmentUnusableError:
        if isinstance(error, PermissionError):
            closed = closed_directory(self._directory)
            whose = f" ({closed})" if closed else ""
            return EnvironmentUnusableError(
                f"permission denied: {self._directory}{whose}", "name a directory of yours: --state-dir"
            )
        return NoSchedulerError(str(self._directory))

    def wait_answer(self, dealer: zmq.Socket[bytes], wait_ms: int) -> bool:
        return bool(dealer.poll(wait_ms))

    @contextmanager
    def awaiting_exit(self) -> Iterator[None]:
        pid = self._listener_pid()
        if not pid:
            yield
            with (self._directory / LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)
            return
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise self._nobody(error) from error
        try:
            yield
            # Sockets and lock are given back some time before: Python ends slowly once torch is loaded.
            end = select.poll()
            end.register(process, select.POLLIN)
            end.poll()
        finally:
            os.close(process)


class RemoteConnection:
    """A TCP endpoint. CURVE keys prove who is on the other side.

    Parameters
    ----------
    endpoint
        ``tcp://HOST:PORT``.
    keys
        A client's directory of keys (``curve``).

    Raises
    ------
    UsageError
        If the endpoint is none, or the keys cannot be used.
    """

    def __init__(self, endpoint: str, keys: Path) -> None:
        self._endpoint = endpoint
        self._address = host_and_port(endpoint)
        self._scheduler, self._own = curve.client_keys(keys)
        self._monitor: zmq.Socket[bytes] | None = None

    @property
    def directory(self) -> None:
        return None

    def connect_to(self, dealer: zmq.Socket[bytes]) -> None:
        dealer.setsockopt(zmq.IPV6, ":" in self._address[0])
        dealer.setsockopt(zmq.CURVE_SERVERKEY, self._scheduler)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, self._own.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, self._own.secret)
        self._monitor = dealer.get_monitor_socket(_FAILED)
        dealer.connect(self._endpoint)

    def release(self, dealer: zmq.Socket[bytes]) -> None:
        if self._monitor is not None:
            dealer.disable_monitor()
            self._monitor.close()
            self._monitor = None

    def check_listener(self) -> None:
        host, port = self._address
        try:
            socket.create_connection((host, int(port)), timeout=_PROBE_S).close()
        except OSError as error:
            raise EnvironmentUnusableError(
                f"no scheduler listens at {self._endpoint}", "start one with `gpuslice up --bind`"
            ) from error

    def wait_answer(self, dealer: zmq.Socket[bytes], wait_ms: int) -> bool:
        monitor = self._monitor
        poller = zmq.Poller()
        for source in (dealer, monitor):
            if source is not None:
                poller.register(source, zmq.POLLIN)
        ready = dict(poller.poll(wait_ms))
        if monitor is not None and monitor in ready and dealer not in ready:
            monitor.recv_multipart()  # there is only one kind: the handshake failed
            raise EnvironmentUnusableError(
                f"{self._endpoint} refuses this key, or is not the scheduler that it is for",
                "have it accepted there: `gpuslice keys add`",
            )
        return dealer in ready

    def awaiting_exit(self) -> AbstractContextManager[None]:
        """Return a context that waits for nothing."""
        return nullcontext()


def find(
    state_dir: str | Path | None = None,
    connect: str | None = None,
    curve_keys: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Connection:
    """Return the connection to the scheduler at ``connect`` or in ``state_dir``.

    Without either, ``environ`` names the scheduler.

    Raises
    ------
    UsageError
        If TCP is wanted without keys, or both a directory and an endpoint are named.
    """
    environ = os.environ if environ is None else environ
    if connect and state_dir:
        raise UsageError(f"both {connect} and the directory {state_dir} are named", "name one scheduler")
    if not connect and not state_dir:
        connect = environ.get(CONNECT)
    if not connect:
        return LocalConnection(config.state_directory(state_dir, environ))
    keys = curve_keys or environ.get(CURVE_KEYS)
    if not keys:
        raise UsageError(f"{connect} needs keys", f"name a directory of keys: --curve-keys, or {CURVE_KEYS}")
    return RemoteConnection(connect, Path(keys))
