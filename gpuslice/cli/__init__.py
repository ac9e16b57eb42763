"""The ``gpuslice`` command: a table of sub-commands, each in its own file, imported only when asked for.

A command module defines ``command``, a function whose annotations declare what it takes (``declare``, or
typer's own), or ``app``, a ``typer.Typer`` with sub-commands. Commands that only ask the scheduler do their
work in ``client_commands``; those named in ``fast_parser`` are called without typer if their command line is
plain.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from gpuslice.errors import GpusliceError, UsageError
from gpuslice.files import occupy_closed_streams

from . import fast_parser
from .scheduler_options import named_scheduler

#: Name -> module. Order is the order of ``gpuslice --help``.
COMMANDS: dict[str, str] = {
    "run": "gpuslice.cli.run",
    "up": "gpuslice.cli.up",
    "submit": "gpuslice.cli.submit",
    "ps": "gpuslice.cli.ps",
    "nodes": "gpuslice.cli.nodes",
    "show": "gpuslice.cli.show",
    "logs": "gpuslice.cli.logs",
    "wait": "gpuslice.cli.wait",
    "cancel": "gpuslice.cli.cancel",
    "suspend": "gpuslice.cli.suspend",
    "resume": "gpuslice.cli.resume",
    "requeue": "gpuslice.cli.requeue",
    "migrate": "gpuslice.cli.migrate",
    "ship": "gpuslice.cli.ship",
    "weight": "gpuslice.cli.weight",
    "set": "gpuslice.cli.set",
    "pause": "gpuslice.cli.pause",
    "unpause": "gpuslice.cli.unpause",
    "drain": "gpuslice.cli.drain",
    "undrain": "gpuslice.cli.undrain",
    "reserve": "gpuslice.cli.reserve",
    "unreserve": "gpuslice.cli.unreserve",
    "events": "gpuslice.cli.events",
    "history": "gpuslice.cli.history",
    "top": "gpuslice.cli.top",
    "timeline": "gpuslice.cli.timeline",
    "down": "gpuslice.cli.down",
    "keys": "gpuslice.cli.keys",
    "demo": "gpuslice.cli.demo",
    "adopt": "gpuslice.cli.adopt",
    "doctor": "gpuslice.cli.doctor",
    "smi": "gpuslice.cli.smi",
    "profile": "gpuslice.cli.profile",
    "skew": "gpuslice.cli.skew",
    "colocate": "gpuslice.cli.colocate",
    "ramdisk": "gpuslice.cli.ramdisk",
    "sim": "gpuslice.cli.sim",
    "trace": "gpuslice.cli.trace",
}
#: Options before the command: which scheduler, if not the one of a directory here.
_SCHEDULER = {"--connect": "GPUSLICE_CONNECT", "--curve-keys": "GPUSLICE_CURVE_KEYS"}
#: The commands that such a scheduler answers, or that say that it cannot.
_ASK_A_SCHEDULER = frozenset(
    {"submit", "ps", "nodes", "show", "logs", "wait", "cancel", "suspend", "resume", "requeue", "migrate"}
) | {
    *("weight", "set", "events", "history", "top", "timeline", "down"),
    *("pause", "unpause", "drain", "undrain", "reserve", "unreserve"),
}
#: What a shell reports of a program that nobody reads any more (SIGPIPE).
_NOBODY_READS = 141


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line ``argv``, by default the process's own, and exit with its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except GpusliceError as error:
        sys.stderr.write(error.lines)
        status = error.exit_code
    except BrokenPipeError:
        # What is left in the buffer is for nobody; Python would complain of it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = _NOBODY_READS
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def _open_closed_streams() -> None:
    """Open /dev/null in place of each closed standard stream. A program that is executed finds it closed."""
    occupy_closed_streams()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _run(arguments: Sequence[str]) -> int:
    arguments = _named(list(arguments))
    if arguments and arguments[0] in fast_parser.COMMANDS:
        act = fast_parser.find(COMMANDS[arguments[0]], arguments[1:])
        if act is not None:
            return act()
    from . import application

    words = _to_complete() or arguments
    names = [words[0]] if words and words[0] in COMMANDS else list(COMMANDS)
    return application.run({name: COMMANDS[name] for name in names}, arguments)


def _to_complete() -> list[str]:
    """Return the words that a shell wants completed. Return none if no shell asks (by the environment)."""
    if "_GPUSLICE_COMPLETE" not in os.environ:
        return []
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    return line.split()[1:]


def _named(arguments: list[str]) -> list[str]:
    """Return ``arguments`` without the options before the command, which name a scheduler.

    They are kept in ``named_scheduler`` and in the environment.

    Raises
    ------
    UsageError
        If the command does not ask a scheduler elsewhere.
    """
    named_scheduler.clear()
    while arguments:
        option, equals, value = arguments[0].partition("=")
        if option not in _SCHEDULER or not (equals or arguments[1:]):
            break
        named_scheduler[option] = os.environ[_SCHEDULER[option]] = value if equals else arguments[1]
        arguments = arguments[1 if equals else 2 :]
    command = arguments[0] if arguments else ""
    if named_scheduler and command in COMMANDS and command not in _ASK_A_SCHEDULER:
        option = next(iter(named_scheduler))
        raise UsageError(f"{option} is not for `gpuslice {command}`, which works here", "leave it out")
    return arguments
