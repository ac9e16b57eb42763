"""Why a job failed: by its user's mistake, for want of resources, or through the infrastructure.

The split follows the Philly study (Jeon et al., ATC 2019): mistakes of users come back with every retry and
waste devices, the others may not. It is read from the exit code and from what the job wrote last.
"""

from __future__ import annotations

import re
import signal
from enum import Enum

import msgspec

from gpuslice.errors import WITHOUT_STATE

#: How much of the end of stderr is looked at, and how much of it is kept.
TAIL_BYTES = 64 << 10
_KEPT_LINES = 16
_LINE_CHARACTERS = 200
#: Written to stderr between two attempts; only what follows it counts.
ATTEMPT_MARK = "gpuslice: started again, attempt "
#: The beginning of the line that says why a command could not be started.
CANNOT_START = "gpuslice: cannot start: "


class Kind(Enum):
    """The classes of failures: whose fault a failure is."""

    USER = "user"
    RESOURCE = "resource"
    INFRASTRUCTURE = "infrastructure"
    TIME_LIMIT = "time_limit"  # nobody's: its owner limited its time


class Failure(msgspec.Struct, frozen=True):
    """The class of a failure, and the reason in words."""

    kind: Kind
    reason: str


_RESOURCE = re.compile(
    r"out of memory|OutOfMemoryError|\bMemoryError\b|not enough memory|annot allocate memory|std::bad_alloc"
    r"|can't allocate memory|STATUS_ALLOC_FAILED|RamDiskFullError|No space left on device|Disk quota exceeded"
    r"|Too many open files|insufficient shared memory|unable to (?:open shared memory|write to file </torch)",
    re.IGNORECASE,
)
#: What the scheduler or a node's agent says of a process that it has given up, or cannot start there.
_GIVEN_UP = r"^gpuslice: (?:node \S+ (?:was lost|cannot start it)|its state could not be brought).*"
_INFRASTRUCTURE = re.compile(
    r"uncorrectable ECC|CUDA error: (?:unspecified launch failure|unknown error|initialization error"
    r"|no CUDA-capable device|all CUDA-capable devices are busy|driver shutting down|the launch timed out"
    r"|hardware stack error)"
    r"|nccl(?:System|Remote|Internal|UnhandledCuda)Error|NCCL watchdog|Dist(?:Network|Store|Backend)Error"
    r"|Connection(?:Reset|Refused|Aborted)Error|BrokenPipeError|Connection (?:reset|refused|closed) by"
    r"|\bTimeoutError\b|Socket Timeout|Input/output error|Stale file handle"
    r"|Transport endpoint is not connected|EADDRINUSE|Address already in use"
    r"|terminate called after throwing an instance of 'c10::"
    rf"|{_GIVEN_UP}|SIG(?:KILL|TERM|HUP)\b",
    re.IGNORECASE,
)
#: The last line of a traceback, also behind torchrun's ``[rank1]:``.
_EXCEPTION = re.compile(
    r"^(?:\[\w+\]:\s*)?(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure|Warning)\b(?=:|$)"
)
#: The beginning of the line on a process in which the hooks could not be installed. It says what to do.
_NO_HOOKS = "gpuslice: no hooks in this process: "
#: A port that another process listens at, and its number in the words of torch and of gloo.
_PORT_IN_USE = re.compile(r"EADDRINUSE|Address already in use", re.IGNORECASE)
_PORT = re.compile(r"\bport: ?(\d+)|:(\d+)[\])]* \(errno")
_PORT_REMEDY = (
    "a parked job keeps its ports, so each job needs its own MASTER_PORT: choose another, or set none (0 for "
    "a job of one rank), and torchrun takes a free one; submit --max-restarts tries again"
)
#: A mistake of the script, even if it ends the process inside torch.
_MISTAKE = re.compile(r"CUDA error: device-side assert triggered")
#: What launchers say of the failure of another process, and what processes say that end with their launcher:
#: those of torch.multiprocessing are interrupted by the kernel (``PR_SET_PDEATHSIG``) or end by ``sys.exit``.
_HEARSAY = re.compile(
    r"ChildFailedError|CalledProcessError|SignalException|ProcessRaisedException"
    r"|^(?:\[\w+\]:\s*)?(?:KeyboardInterrupt|SystemExit)\b"
)
#: What torchrun says of ranks that it ended itself, and the headings of its summary: failures, and the cause.
_ENDED_BY_LAUNCHER = "closing signal SIG"
_OTHERS, _CAUSE = "\nFailures:\n", "\nRoot Cause (first observed failure):\n"
_HANDLING = "During handling of the above exception"
#: Signals that are the fault of the process itself, not of the process or person that sent them.
_CRASHES = {signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
_COMMAND_CODES = {126: "its command cannot be executed", 127: "its command does not exist"}


def telling(text: str) -> str:
    """Return the lines of ``text``, the end of a job's stderr, that say why the job ended."""
    lines = _without_ended_by_launcher(text.rsplit(ATTEMPT_MARK, 1)[-1])
    kept = [line.strip()[:_LINE_CHARACTERS] for line in lines if _tells(line)]
    return "\n".join(kept[-_KEPT_LINES:])


def _without_ended_by_launcher(text: str) -> list[str]:
    """Return the lines of ``text`` except those on ranks that torchrun ended for another rank's failure."""
    before, cause, after = text.rpartition(_CAUSE)
    if not cause:
        return text.splitlines()
    lines = before.rsplit(_OTHERS, 1)[0].splitlines()
    return [line for line in lines if _ENDED_BY_LAUNCHER not in line] + after.splitlines()


def _tells(line: str) -> bool:
    line = line.strip()
    return bool(
        line.startswith((_HANDLING, CANNOT_START, _NO_HOOKS))
        or _EXCEPTION.match(line)
        or WITHOUT_STATE in line
        or _RESOURCE.search(line)
        or _INFRASTRUCTURE.search(line)
    )


def classify(code: int, words: str) -> Failure:
    """Return why a command failed, by its exit ``code`` (negative: a signal) and ``words`` (see ``telling``).

    Of several exceptions, a lack of resources counts before a mistake, and a mistake before broken
    connections: where one rank of a gang fails, the others lose their connections to it.
    """
    if given_up := re.search(_GIVEN_UP, words, re.MULTILINE):
        return Failure(Kind.INFRASTRUCTURE, given_up[0])
    verdicts = _verdicts(words)
    number = -code if code < 0 else code - 128
    if code < 0 or number in set(signal.Signals):
        return _by_signal(number, verdicts)
    unknown = Failure(Kind.USER, _COMMAND_CODES.get(code, f"it ended with exit code {code}"))
    return _weightiest(verdicts) or unknown


def verdict(words: str) -> Failure | None:
    """Return why a command failed, judged by its last ``words`` alone; None if they do not tell."""
    return _weightiest(_verdicts(words))


def _weightiest(
    verdicts: dict[Kind, str], kinds: tuple[Kind, ...] = (Kind.RESOURCE, Kind.USER, Kind.INFRASTRUCTURE)
) -> Failure | None:
    for kind in kinds:
        if kind in verdicts:
            return Failure(kind, _explained(verdicts[kind]))
    return None


def _explained(line: str) -> str:
    """Return ``line`` as the reason of a failure, with a remedy if a port was in use."""
    if not _PORT_IN_USE.search(line):
        return line
    found = _PORT.search(line)
    port = f"port {found[1] or found[2]}" if found else "a port"
    return f"{port} is in use (EADDRINUSE): {_PORT_REMEDY}"


def _verdicts(words: str) -> dict[Kind, str]:
    """Return, for each kind of failure, the last line of ``words`` that is a sign of it."""
    found: list[tuple[Kind | None, str]] = []
    for line in words.splitlines():
        if WITHOUT_STATE in line:  # whatever the script has said before, it is not why the process ended
            return {Kind.RESOURCE if _RESOURCE.search(line) else Kind.INFRASTRUCTURE: line}
        if line.startswith(_HANDLING):
            found = found[:-1]  # this exception was being handled when the next one was raised
        elif _HEARSAY.search(line):
            found.append((None, line))
        elif _RESOURCE.search(line):
            found.append((Kind.RESOURCE, line))
        elif _INFRASTRUCTURE.search(line):
            found.append((Kind.INFRASTRUCTURE, line))
        else:
            found.append((Kind.USER, line))
    if _MISTAKE.search(words):
        found = [(kind, line) for kind, line in found if kind is not Kind.INFRASTRUCTURE]
    return {kind: line for kind, line in found if kind is not None}


def _by_signal(number: int, verdicts: dict[Kind, str]) -> Failure:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number == signal.SIGBUS:
        return Failure(Kind.RESOURCE, "it was ended by SIGBUS, as when shared memory is full")
    if number in _CRASHES:
        crash = Failure(Kind.USER, f"it crashed with {name}")
        return _weightiest(verdicts, (Kind.RESOURCE, Kind.INFRASTRUCTURE)) or crash
    who = ", by the kernel for want of memory or by somebody" if number == signal.SIGKILL else ""
    return Failure(Kind.INFRASTRUCTURE, f"it was ended by {name}{who}")
