"""The nouns that every part shares: devices, routes, jobs, epochs, leases; and what values may be.

Every number and string that comes from elsewhere (a socket, the command line, the environment, a
configuration file, a journal) is of one of the types below, which state its range and its alphabet. It is
checked where it comes in: by msgspec where it is decoded, by ``checked`` where it is made from Python values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, NewType, TypeVar

import msgspec
from msgspec import Meta

from gpuslice.errors import UsageError

#: Larger whole numbers are not exact in JSON nor as a float.
MAX_COUNT = 2**53
MAX_BYTES = 2**60
#: About 31 years.
MAX_SECONDS = 1e9
MAX_RANKS = 1 << 16
#: The longest text for people: the reason of an error, the last words of a job.
MAX_TEXT = 1 << 16

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
_NAME_PATTERN = rf"\A{_NAME}\Z"
#: What the kernel ends strings by cannot be in them; lone surrogates are how Python reads what is not UTF-8.
_WORD_PATTERN = r"\A[^\x00\ud800-\udfff]*\Z"
_VARIABLE_PATTERN = r"\A[^=\x00\ud800-\udfff]*\Z"
_LABEL_PATTERN = r"\A[^=\x00-\x1f\x7f\ud800-\udfff]*\Z"
_TEXT_PATTERN = r"\A[^\ud800-\udfff]*\Z"
_ALPHABETS = {
    _NAME_PATTERN: "up to 64 letters, digits, '_', '.' or '-', the first a letter or digit",
    _WORD_PATTERN: "UTF-8 text without the character NUL",
    _VARIABLE_PATTERN: "UTF-8 text without '=' and the character NUL",
    _LABEL_PATTERN: "UTF-8 text without '=' and control characters",
    _TEXT_PATTERN: "UTF-8 text",
}

#: How many, and which: steps, boundaries, epochs, numbers of events.
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
#: The number of a boundary; a large one is never reached.
StopAt = Annotated[int, Meta(ge=0, le=2**62)]
ByteCount = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
RankNumber = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
RankCount = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
#: A `RankCount`, or 0: not stated.
OptionalRankCount = Annotated[int, Meta(ge=0, le=MAX_RANKS)]
#: A process, as a rank calls itself or the kernel does.
Pid = Annotated[int, Meta(ge=0, lt=2**31)]
PortNumber = Annotated[int, Meta(ge=1, lt=2**16)]
#: Negative: a signal.
ExitCode = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)]
#: A moment of a scheduler's clock, which goes on from one scheduler to the next.
Moment = Annotated[float, Meta(ge=0.0, le=1e12)]
#: A training loss: any finite number.
Loss = Annotated[float, Meta(ge=-1e300, le=1e300)]
Weight = Annotated[float, Meta(ge=1e-6, le=1e6)]
#: A job's name, which is part of the names of files.
JobName = Annotated[str, Meta(pattern=_NAME_PATTERN)]
#: A word of a command line, the value of a variable.
Word = Annotated[str, Meta(pattern=_WORD_PATTERN)]
PathText = Annotated[str, Meta(pattern=_WORD_PATTERN, max_length=4096)]
VariableName = Annotated[str, Meta(pattern=_VARIABLE_PATTERN)]
#: A tenant, a device, the stage of a switch.
Label = Annotated[str, Meta(pattern=_LABEL_PATTERN, max_length=64)]
Text = Annotated[str, Meta(pattern=_TEXT_PATTERN, max_length=MAX_TEXT)]
#: Seconds by stage, as ranks report them.
Stages = Annotated[dict[Label, Seconds], Meta(max_length=32)]

JobId = NewType("JobId", str)
Rank = NewType("Rank", int)
#: The fencing token of a lease: grows by one with every lease of a job; reports of older epochs are dropped.
Epoch = NewType("Epoch", int)
#: From which tensor skew on a job is placed on as few nodes as possible (docs/measure.md).
CONSOLIDATION_SKEW = 0.3

_DEVICE = re.compile(r"(cpu|cuda|null)(?::([0-9]{1,3}))?((?:\+[0-9]{1,3})*)")
_JOB = re.compile(_NAME)
_BOUND = re.compile(r"Expected `(int|float)` ([<>]=?) (\S+)")
_LENGTH = re.compile(r"Expected `(?:str|object|array)` of length <= (\d+)")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, order=True)
class DeviceName:
    """A device as the user writes it: ``cpu``, ``cpu:1``, ``cuda:0``, ``null:0``.

    ``cpu`` without an index is the whole host (index ``None``); ``cpu:1`` is slot 1 of the host.
    ``cuda`` means ``cuda:0``. ``cuda:0+1`` is both GPUs, of one process: ``further`` are all but the first.
    ``n1/cuda:0`` is the device of that name on another node, ``n1``.
    """

    kind: str
    index: int | None
    further: tuple[int, ...] = ()
    node: str = ""

    @classmethod
    def parse(cls, text: str, *, several: bool = False) -> DeviceName:
        """Read ``cpu:1`` and the like.

        Parameters
        ----------
        several
            Whether ``cuda:0+1`` is a device here, too.

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
        """The device of this name on ``node``; empty: on the node itself."""
        return replace(self, node=node)

    @property
    def indices(self) -> tuple[int, ...]:
        """Of all its GPUs, the first one first; 0 where there is only one device."""
        return (self.index or 0, *self.further)


class Route(Enum):
    """How a device is emptied; see docs/gpus.md."""

    AUTO = "auto"
    TENSOR = "tensor"
    VMM = "vmm"
    DRIVER = "driver"

    @property
    def needs_gpu(self) -> bool:
        """Whether only GPUs can be emptied so."""
        return self in (Route.VMM, Route.DRIVER)


def job_id(text: str) -> JobId:
    """Check a job's name: 1 to 64 of letters, digits, ``_ . -``, starting with a letter or digit.

    Raises
    ------
    UsageError
        If the name could not be a file name.
    """
    if _JOB.fullmatch(text) is None:
        raise UsageError(f"{text!r} is not a job name", "use up to 64 letters, digits, '_', '.' or '-'")
    return JobId(text)


@dataclass(frozen=True, slots=True)
class Lease:
    """A gang's right to its devices until told otherwise.

    Attributes
    ----------
    job
        Who holds it.
    epoch
        Fencing token.
    placement
        One device per rank, rank order.
    deadline_s
        When the quantum ends (clock of whoever granted it), or ``None`` for no end.
    """

    job: JobId
    epoch: Epoch
    placement: tuple[DeviceName, ...]
    deadline_s: float | None = None


def checked(value: _T) -> _T:
    """``value``, a struct that was made in Python, if each of its fields is of its type.

    Raises
    ------
    UsageError
        Naming the field.
    """
    try:
        return msgspec.convert(msgspec.to_builtins(value), type(value))
    except msgspec.ValidationError as error:
        raise UsageError(explain(error), "see --help for what is possible") from error


def is_word(text: str) -> bool:
    """Whether ``text`` is a ``Word``: UTF-8 text without NUL."""
    return re.search(_WORD_PATTERN, text) is not None


def explain(error: Exception) -> str:
    """What msgspec found wrong, in words: ``steps has to be a whole number <= 9007199254740992``."""
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
    return f"{field}: {what}" if field else what


def shortened(text: str, most: int = MAX_TEXT) -> str:
    """``text`` as a ``Text`` of at most ``most`` characters: what cannot be encoded is replaced."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= most else f"{text[: most - 3]}..."
