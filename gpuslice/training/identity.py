"""The identity of a training, kept in its snapshots: script, arguments, ``attach`` and version of torch.

It is compared before a training goes on from a snapshot. Otherwise another script, other arguments or another
``attach`` of the process would silently go on with the wrong weights.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import shlex
import sys
import time
from collections.abc import Iterator
from enum import Enum
from types import CodeType, FrameType
from typing import Any

import msgspec
import torch

from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.named.state import OWN_PREFIX, plain_value
from gpuslice.config import Settings
from gpuslice.errors import RefusedSnapshotError
from gpuslice.launch.job_names import differing_options

#: The name of the identity in a snapshot.
NAME = f"{OWN_PREFIX}training"
#: The key of a training that is not known, because its file does not name it.
UNKNOWN = "0" * 16
#: Most characters of a command that a message shows.
_SHOWN = 160


class Claim(Enum):
    """How a training relates to a snapshot of its job: the snapshot is its own, or another training's."""

    OWN = "it goes on from it"
    OTHERS = "another training of the same command goes on from it"


class Training(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call of ``attach`` in one process.

    Attributes
    ----------
    script
        The file's name, ``-m`` and a module, ``-c``, ``a notebook`` or ``standard input``.
    digest
        Digest of the script's text.
    arguments
        The script's arguments.
    attach
        Number of the ``attach`` call in the process, from 1.
    torch
        Version of torch, without the part from ``+`` on.
    command
        A fingerprint of the command. One command may have several trainings, in several processes or scripts.
    """

    script: str
    digest: str
    arguments: tuple[str, ...]
    attach: int
    torch: str
    command: str

    @classmethod
    def present(cls, arguments: list[str], attach: int, command: str) -> Training:
        """Return the training that this process is about to attach.

        Parameters
        ----------
        arguments
            ``sys.argv`` as it was when the process began: scripts change it.
        attach, command
            As the attributes of that name.
        """
        script, digest = _script(arguments)
        return cls(
            script=script,
            digest=digest,
            arguments=() if in_notebook() else tuple(map(_text, arguments[1:])),
            attach=attach,
            torch=torch.__version__.partition("+")[0],
            command=command,
        )

    @classmethod
    def of(cls, snapshot: SnapshotFile) -> Training | None:
        """Return the training that wrote a snapshot, or None if the file says nothing of it."""
        text = plain_value(snapshot, NAME)
        try:
            return msgspec.json.decode(text, type=cls) if isinstance(text, str) else None
        except msgspec.DecodeError:
            return None

    def text(self) -> str:
        """Return this identity as the text that a snapshot holds."""
        return msgspec.json.encode(self).decode()

    @property
    def key(self) -> str:
        """A digest that tells this training from all others of its job, as 16 hexadecimal digits."""
        own = msgspec.json.encode(msgspec.structs.replace(self, command=""))
        return hashlib.blake2b(own, digest_size=8).hexdigest()

    def claim(self, other: Training | None, settings: Settings) -> Claim:
        """Return OWN if this training may go on from a snapshot of ``other``, OTHERS if another one does.

        Raises
        ------
        RefusedSnapshotError
            If only the user can tell.
        """
        same_script = other is not None and (other.script, other.arguments) == (self.script, self.arguments)
        same_attach = other is None or other.attach == self.attach
        if other is not None and same_script and (other.digest, other.torch) == (self.digest, self.torch):
            return Claim.OWN if same_attach else Claim.OTHERS
        if settings.continue_anyway and same_attach:
            return Claim.OWN
        of_one_command = other is not None and bool(self.command) and other.command == self.command
        if settings.socket or settings.continue_anyway or (of_one_command and not same_script):
            return Claim.OTHERS
        raise self._refusal(other, settings.job)

    def _refusal(self, other: Training | None, job: str) -> RefusedSnapshotError:
        name = _naming(job, self, other)
        ways = f"begin anew with --fresh, give this one another name with --job {name}, or --continue-anyway"
        if other is None:
            return RefusedSnapshotError(
                f"job {job} has a snapshot that does not say which run wrote it", ways
            )
        if (other.script, other.arguments) != (self.script, self.arguments):
            what = f"job {job} has a snapshot of another run: {other}; this is: {self}"
        elif other.digest != self.digest:
            what = f"job {job} has a snapshot that {other} wrote before its text was changed"
        else:
            what = f"job {job} has a snapshot that torch {other.torch} wrote, and this is torch {self.torch}"
        return RefusedSnapshotError(what, ways)

    def __str__(self) -> str:
        command = shlex.join([*self.script.split(" "), *self.arguments])
        shown = command if len(command) <= _SHOWN else f"{command[:_SHOWN]}..."
        return shown if self.attach == 1 else f"{shown}, its training {self.attach}"


def origin(snapshot: SnapshotFile) -> str:
    """Return in words at which boundary, when and by which training a snapshot was taken."""
    taken = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(snapshot.record.created_ns / 1e9))
    training = Training.of(snapshot)
    return f"boundary {snapshot.boundary} of {taken}: {training or 'an unknown run'}"


def _naming(job: str, training: Training, other: Training | None) -> str:
    """Return a value for ``--job`` with a field for each option in which the two trainings differ."""
    fields = [] if other is None else differing_options(training.arguments, other.arguments)
    return f"'{'-'.join([job, *(f'{{{field}}}' for field in fields)])}'" if fields else "NAME"


def _script(arguments: list[str]) -> tuple[str, str]:
    """Return the name of the main script and a digest of its text."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if file is not None and not file.startswith("<"):
        name = os.path.basename(file) if spec is None or spec.name == "__main__" else f"-m {spec.name}"
        return name, _digest(_content(main, file))
    if arguments[:1] == ["-c"]:
        return "-c", _digest(sys.orig_argv[-len(arguments)].encode(errors="surrogateescape"))
    frame = _outermost_frame(vars(main))
    if frame is None:
        return "standard input", _digest(b"")
    lines = linecache.getlines(frame.f_code.co_filename)
    text = "".join(lines).encode() if lines else b"".join(_parts(frame.f_code))
    return "a notebook" if in_notebook() else "standard input", _digest(text)


def _content(main: Any, file: str) -> bytes:
    """Return the text of a script, which may be in an archive; empty if it cannot be read any more."""
    try:
        with open(file, "rb") as script:
            return script.read()
    except OSError:
        loader = getattr(main, "__loader__", None)
    try:
        return b"" if loader is None else bytes(loader.get_data(file))
    except (AttributeError, OSError):
        return b""


def in_notebook() -> bool:
    """Return True if IPython executes the script. The arguments are then those of its kernel."""
    return "get_ipython" in vars(sys.modules["__main__"])


def _outermost_frame(names: dict[str, Any]) -> FrameType | None:
    """Return the outermost frame on this thread's stack with these global names."""
    frame: FrameType | None = sys._getframe()
    found = None
    while frame is not None:
        found = frame if frame.f_globals is names else found
        frame = frame.f_back
    return found


def _parts(code: CodeType) -> Iterator[bytes]:
    """Yield the bytes that identify code whose text is not available."""
    yield code.co_code
    yield repr(code.co_names).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)
        else:
            yield repr(constant).encode()


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _text(argument: str) -> str:
    """Return an argument as text that a file can hold."""
    return argument.encode(errors="surrogateescape").decode(errors="backslashreplace")
