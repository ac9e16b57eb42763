"""The types that every part shares: devices, routes, jobs, epochs, leases, and the ranges of values.

Every number and string that comes from elsewhere (a socket, the command line, the environment, a
configuration file, a journal) has one of the types below, which state its range and its alphabet. Decoded
values are checked by msgspec, values made in Python by ``checked``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, NewType, TypeVar

import msgspec
from msgspec import Meta

from gpuslice.errors import UsageError

#: Larger whole numbers are exact neither in JSON nor as a float.
MAX_COUNT = 2**53
MAX_BYTES = 2**60
#: About 31 years.
MAX_SECONDS = 1e9
MAX_RANKS = 1 << 16
#: Most characters of a text for people, such as the reason of an error or a job's last lines.
MAX_TEXT = 1 << 16

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
_NAME_PATTERN = rf"\A{_NAME}\Z"
#: No NUL, which ends the kernel's strings, and no lone surrogates, which Python reads for invalid UTF-8.
_WORD_PATTERN = r"\A[^\x00\ud800-\udfff]*\Z"
_VARIABLE_PATTERN = r"\A[^=\x00\ud800-\udfff]*\Z"
_DEPENDENCY_PATTERN = rf"\A{_NAME}(:ok|:any|:failed)?\Z"
_LABEL_PATTERN = r"\A[^=\x00-\x1f\x7f\ud800-\udfff]*\Z"
_TEXT_PATTERN = r"\A[^\ud800-\udfff]*\Z"
_ALPHABETS = {
    _NAME_PATTERN: "up to 64 letters, digits, '_', '.' or '-', the first a letter or digit",
    _WORD_PATTERN: "UTF-8 text without the character NUL",
    _VARIABLE_PATTERN: "UTF-8 text without '=' and the character NUL",
    _DEPENDENCY_PATTERN: "a job's id, alone or with :ok, :any or :failed behind it",
    _LABEL_PATTERN: "UTF-8 text without '=' and control characters",
    _TEXT_PATTERN: "UTF-8 text",
}

#: A count or a number in a sequence: of steps, boundaries, epochs or events.
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
#: The number of a boundary to stop at. A very large one is never reached.
StopAt = Annotated[int, Meta(ge=0, le=2**62)]
ByteCount = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
RankNumber = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
RankCount = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
#: A `RankCount`, or 0: not stated.
OptionalRankCount = Annotated[int, Meta(ge=0, le=MAX_RANKS)]
#: A process id.
Pid = Annotated[int, Meta(ge=0, lt=2**31)]
PortNumber = Annotated[int, Meta(ge=1, lt=2**16)]
#: A process's exit code; negative for a signal.
ExitCode = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)]
#: A moment of a scheduler's clock, which goes on from one scheduler to the next.
Moment = Annotated[float, Meta(ge=0.0, le=1e12)]
#: A job's priority; higher first.
Priority = Annotated[int, Meta(ge=-(10**6), le=10**6)]
#: A Unix time, up to the year 8307.
UnixTime = Annotated[float, Meta(ge=0.0, le=2e11)]
#: A training loss: any finite number.
Loss = Annotated[float, Meta(ge=-1e300, le=1e300)]
Weight = Annotated[float, Meta(ge=1e-6, le=1e6)]
#: A job's name, which is part of the names of files.
JobName = Annotated[str, Meta(pattern=_NAME_PATTERN)]
#: A word of a command line, the value of a variable.
Word = Annotated[str, Meta(pattern=_WORD_PATTERN)]
PathText = Annotated[str, Meta(pattern=_WORD_PATTERN, max_length=4096)]
VariableName = Annotated[str, Meta(pattern=_VARIABLE_PATTERN)]
#: A job that another one follows, and how it must have ended: ``a``, ``a:ok``, ``a:any`` or ``a:failed``.
Dependency = Annotated[str, Meta(pattern=_DEPENDENCY_PATTERN)]
#: A tenant, a device, the stage of a switch.
Label = Annotated[str, Meta(pattern=_LABEL_PATTERN, max_length=64)]
Text = Annotated[str, Meta(pattern=_TEXT_PATTERN, max_length=MAX_TEXT)]
#: Seconds by stage, as ranks report them.
Stages = Annotated[dict[Label, Seconds], Meta(max_length=32)]

JobId = NewType("JobId", str)
Rank = NewType("Rank", int)
#: The fencing token of a lease: grows by one with every lease of a job; reports of older epochs are dropped.
Epoch = NewType("Epoch", int)
#: Least tensor skew at which a job is placed on as few nodes as possible (docs/measure.md).
CONSOLIDATION_SKEW = 0.3

_DEVICE = re.compile(r"(cpu|cuda|null)(?::([0-9]{1,3}))?((?:\+[0-9]{1,3})*)")
_JOB = re.compile(_NAME)
_BOUND = re.compile(r"Expected `(int|float)` ([<>]=?) (\S+)")
_LENGTH = re.compile(r"Expected `(?:str|object|array)` of length <= (\d+)")
_ENUM = re.compile(r"Invalid enum value (.*)")
_TYPE = re.compile(r"Expected `([^`<>=]*)`, got `([^`]*)`")
#: msgspec's names of types, in words.
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "null": "nothing",
    "array": "a list",
    "object": "a table",
}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, order=True)
class DeviceName:
    """The name of a device as the user writes it: ``cpu``, ``cpu:1``, ``cuda:0``, ``null:0``.

    ``cpu`` without an index is the whole host (index ``None``); ``cpu:1`` is slot 1 of the host.
    ``cuda`` means ``cuda:0``. ``cuda:0+1`` is two GPUs of one process: ``further`` are all but the first.
    ``n1/cuda:0`` is the device of that name on another node, ``n1``.
    """

    kind: str
    index: int | None
    further: tuple[int, ...] = ()
    node: str = ""

    @classmethod
    def parse(cls, text: str, *, several: bool = False) -> DeviceName:
        """Return the device that ``text``, such as ``cpu:1``, names.

        Parameters
        ----------
        several
            True to accept several GPUs, such as ``cuda:0+1``.

        Raises
        ------
        UsageError
            If ``text`` is not a device name.
        """
        match = _DEVICE.fullmatch(text)
        if match is None:
            raise UsageError(f"{text!r} is not a device", "write cpu, cpu:1 or cuda:0")
        kind, index, words = match.groups()
        further = tuple(map(int, words.split("+")[1:]))
        if further and not several:
            raise UsageError(f"{text!r} is not one device", "name a single one, as in cuda:0")
        if further and (kind != "cuda" or index is None or len({int(index), *further}) <= len(further)):
            raise UsageError(f"{text!r} is not a device", "several GPUs of one process are, as in cuda:0+1")
        if index is None:
            return cls(kind, None if kind == "cpu" else 0)
        return cls(kind, int(index), further)

    def __str__(self) -> str:
        on = f"{self.node}/" if self.node else ""
        if self.index is None:
            return f"{on}{self.kind}"
        return on + "+".join([f"{self.kind}:{self.index}", *map(str, self.further)])

    def on(self, node: str) -> DeviceName:
        """Return this device name with ``node`` as its node; an empty text means the node itself."""
        return replace(self, node=node)

    @property
    def indices(self) -> tuple[int, ...]:
        """The indices of all GPUs of this device, the first one first; only 0 for the whole host."""
        return (self.index or 0, *self.further)


class Route(Enum):
    """The ways to empty a device; see docs/gpus.md."""

    AUTO = "auto"
    TENSOR = "tensor"
    VMM = "vmm"
    DRIVER = "driver"

    @property
    def needs_gpu(self) -> bool:
        """True if the route exists on GPUs only."""
        return self in (Route.VMM, Route.DRIVER)


def job_id(text: str) -> JobId:
    """Return ``text`` as a job's id: up to 64 letters, digits, ``_ . -``, the first a letter or digit.

    Raises
    ------
    UsageError
        If ``text`` is no such name.
    """
    if _JOB.fullmatch(text) is None:
        raise UsageError(f"{text!r} is not a job name", "use up to 64 letters, digits, '_', '.' or '-'")
    return JobId(text)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of a job's ranks to their devices, until the scheduler takes the devices back.

    Attributes
    ----------
    job
        The job that holds the lease.
    epoch
        The lease's fencing token.
    placement
        One device per rank, in rank order.
    deadline_s
        When the quantum ends, by the scheduler's clock, or ``None`` for no end.
    """

    job: JobId
    epoch: Epoch
    placement: tuple[DeviceName, ...]
    deadline_s: float | None = None


def checked(value: _T) -> _T:
    """Return ``value``, a struct that was made in Python, after checking the type and range of each field.

    Raises
    ------
    UsageError
        If a field has a wrong value. The error names the field.
    """
    try:
        return msgspec.convert(msgspec.to_builtins(value), type(value))
    except msgspec.ValidationError as error:
        raise UsageError(explain(error), "see --help for what is possible") from error


def is_word(text: str) -> bool:
    """Return True if ``text`` is a ``Word``: UTF-8 text without NUL."""
    return re.search(_WORD_PATTERN, text) is not None


def explain(error: Exception) -> str:
    """Return msgspec's error in words: ``steps has to be a whole number <= 9007199254740992``."""
    what, _, where = str(error).partition(" - at `")
    field = where.rstrip("`").replace("key` in `$.", "a name in $.").removeprefix("$").removeprefix(".")
    field = field.replace("a name in $.", "a name in ")
    for pattern, words in _ALPHABETS.items():
        if repr(pattern) in what:
            return f"{field or 'it'} has to be {words}"
    if (bound := _BOUND.match(what)) is not None:
        kind = {"int": "a whole number", "float": "a number"}[bound[1]]
        return f"{field or 'it'} has to be {kind} {bound[2]} {float(bound[3]):.16g}"
    if (length := _LENGTH.match(what)) is not None:
        return f"{field or 'it'} has to be no longer than {length[1]}"
    if (value := _ENUM.match(what)) is not None:
        return f"{field or 'it'} cannot be {value[1]}"
    if (types := _TYPE.match(what)) is not None:
        wanted, found = (
            " or ".join(_TYPES.get(name.strip(), name.strip()) for name in side.split("|"))
            for side in types.groups()
        )
        return f"{field or 'it'} has to be {wanted}, not {found}"
    return f"{field}: {what}" if field else what


def shortened(text: str, most: int = MAX_TEXT) -> str:
    """Return ``text`` cut to ``most`` characters. Characters that cannot be encoded are replaced."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= most else f"{text[: most - 3]}..."
