"""CURVE keys for TCP: the scheduler's keys, the accepted clients' keys, and the check of both.

A directory of keys holds files of one line each, Z85 text: ``scheduler.public`` and, where the scheduler
runs, ``scheduler.secret`` and ``accepted/NAME.public`` of every accepted client; ``client.public`` and
``client.secret`` of the user whose directory it is. Directories have mode 0700, files 0600; others are
refused.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from gpuslice.errors import ConfigError, UsageError

SCHEDULER, CLIENT = "scheduler", "client"
_ACCEPTED = "accepted"
_KEY_CHARACTERS = 40
_REMEDY = "`gpuslice keys new DIR` makes a directory of keys"
#: Address at which libzmq asks about every client (RFC 27, ZAP).
_ZAP = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_ZAP_FRAMES = 7
_KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeyPair:
    """A key and its secret half, as Z85 text."""

    public: bytes
    secret: bytes


def make(directory: Path) -> None:
    """Make ``directory`` with keys for a scheduler and for one client, which is accepted.

    Raises
    ------
    UsageError
        If there is something of that name already, or it cannot be made.
    """
    _make_directory(directory)
    scheduler, client = _new(), _new()
    _write(directory / f"{SCHEDULER}.public", scheduler.public)
    _write(directory / f"{SCHEDULER}.secret", scheduler.secret)
    _write(directory / f"{CLIENT}.public", client.public)
    _write(directory / f"{CLIENT}.secret", client.secret)
    _make_directory(directory / _ACCEPTED)
    _write(directory / _ACCEPTED / f"{CLIENT}.public", client.public)


def add(directory: Path, name: str, out: Path) -> None:
    """Make ``out`` with keys for another client, which is accepted as ``name`` from now on.

    Raises
    ------
    UsageError
        If the name is taken or unsuitable, ``out`` exists, or ``directory`` is not that of a scheduler.
    """
    public = _read(directory, f"{SCHEDULER}.public")
    _read(directory, f"{SCHEDULER}.secret")
    if _NAME.fullmatch(name) is None:
        raise UsageError(f"{name!r} is no name for a client", "use up to 64 letters, digits, '_', '.' or '-'")
    accepted = directory / _ACCEPTED / f"{name}.public"
    if accepted.exists():
        raise UsageError(f"{accepted} exists", "choose another name, or remove it to lock that client out")
    _make_directory(out)
    client = _new()
    _write(out / f"{SCHEDULER}.public", public)
    _write(out / f"{CLIENT}.public", client.public)
    _write(out / f"{CLIENT}.secret", client.secret)
    _write(accepted, client.public)


def scheduler_keys(directory: Path) -> KeyPair:
    """Return the scheduler's own keys.

    Raises
    ------
    ConfigError
        If they are not there, are no keys, or others can read them.
    """
    return _pair(directory, SCHEDULER)


def client_keys(directory: Path) -> tuple[bytes, KeyPair]:
    """Return the scheduler's public key and the client's own keys. Raises as ``scheduler_keys`` does."""
    return _read(directory, f"{SCHEDULER}.public"), _pair(directory, CLIENT)


def accepted(directory: Path) -> dict[bytes, str]:
    """Return the names of the accepted clients, by public key. A file that is no key accepts no client."""
    found: dict[bytes, str] = {}
    for path in sorted((directory / _ACCEPTED).glob("*.public")):
        try:
            found[_read(path.parent, path.name)] = path.stem
        except ConfigError as error:
            _log.warning("%s accepts no client: %s", path, error)
    return found


class KeyAuthenticator:
    """Answers libzmq's question whether a client is accepted, for all CURVE sockets of ``context``.

    The directory is read at every question: a key that is added or removed counts from then on.

    Parameters
    ----------
    context
        Context of the sockets that it protects.
    directory
        The directory of keys.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: Path) -> None:
        self._directory = directory
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP)

    def answer(self) -> None:
        """Answer for every client that asks to connect."""
        while self.socket.poll(0):
            frames = self.socket.recv_multipart()
            number = frames[1] if len(frames) > 1 else b""
            name = self._name(frames)
            status, text = (b"200", b"OK") if name else (b"400", b"this key is not accepted")
            self.socket.send_multipart([_ZAP_VERSION, number, status, text, (name or "").encode(), b""])

    def _name(self, frames: list[bytes]) -> str | None:
        if len(frames) != _ZAP_FRAMES or frames[0] != _ZAP_VERSION or frames[5] != b"CURVE":
            return None
        if len(frames[6]) != _KEY_BYTES:
            return None
        name = accepted(self._directory).get(z85.encode(frames[6]))
        if name is None:
            _log.warning("refused an unknown key from %s", frames[3].decode(errors="replace"))
        return name


def _new() -> KeyPair:
    return KeyPair(*zmq.curve_keypair())


def _pair(directory: Path, name: str) -> KeyPair:
    return KeyPair(_read(directory, f"{name}.public"), _read(directory, f"{name}.secret"))


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise UsageError(f"cannot make {directory}: {error.strerror}", "name one to be made") from error


def _write(path: Path, key: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key + b"\n")


def _read(directory: Path, name: str) -> bytes:
    path = directory / name
    try:
        _check_private(directory.stat(), directory, "chmod 700")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror}", _REMEDY) from error
    with os.fdopen(descriptor, "rb") as file:
        _check_private(os.fstat(descriptor), path, "chmod 600")
        key = file.read(_KEY_CHARACTERS + 2).strip()
    try:
        whole = len(key) == _KEY_CHARACTERS and bool(zmq.curve_public(key))
    except (ValueError, zmq.ZMQError):
        whole = False
    if not whole:
        raise ConfigError(f"{path} is no key", _REMEDY)
    return key


def _check_private(status: os.stat_result, path: Path, remedy: str) -> None:
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"others may read or change {path}", f"make it yours alone: {remedy} {path}")
