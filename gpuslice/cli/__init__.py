"""The ``gpuslice`` command: a table of sub-commands, each in its own file, imported only when asked for.

A command module defines ``command`` (a function with typer annotations) and may define
``CONTEXT_SETTINGS`` and ``CommandClass``, or defines ``app`` (a ``typer.Typer`` with sub-commands).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, cast

import typer

from gpuslice.errors import GpusliceError

#: What the parser raises for a wrong command line; typer exports only classes derived from it.
ParserError = cast(type[Exception], typer.BadParameter.__mro__[2])

#: Name -> module. Order is the order of ``gpuslice --help``.
COMMANDS: dict[str, str] = {
    "run": "gpuslice.cli.run",
    "up": "gpuslice.cli.up",
    "submit": "gpuslice.cli.submit",
    "ps": "gpuslice.cli.ps",
    "logs": "gpuslice.cli.logs",
    "wait": "gpuslice.cli.wait",
    "cancel": "gpuslice.cli.cancel",
    "suspend": "gpuslice.cli.suspend",
    "resume": "gpuslice.cli.resume",
    "events": "gpuslice.cli.events",
    "down": "gpuslice.cli.down",
    "demo": "gpuslice.cli.demo",
    "doctor": "gpuslice.cli.doctor",
    "ramdisk": "gpuslice.cli.ramdisk",
    "sim": "gpuslice.cli.sim",
    "trace": "gpuslice.cli.trace",
}


def _version(show: bool) -> None:
    if show:
        from gpuslice import __version__

        typer.echo(f"gpuslice {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Time-slice, suspend, migrate and pack PyTorch training jobs, bit for bit."""


def build(names: Sequence[str]) -> typer.Typer:
    """The typer application with the commands in ``names`` only."""
    app = typer.Typer(name="gpuslice", no_args_is_help=True, pretty_exceptions_enable=False, callback=_root)
    for name in names:
        module = importlib.import_module(COMMANDS[name])
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            settings = getattr(module, "CONTEXT_SETTINGS", None)
            cls = getattr(module, "CommandClass", None)
            app.command(name, cls=cls, context_settings=settings)(module.command)
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the ``gpuslice`` script; exits the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    names = [arguments[0]] if arguments and arguments[0] in COMMANDS else list(COMMANDS)
    try:
        # Not standalone: the parser would print a box of many lines where one says it all.
        status = build(names)(args=arguments, prog_name="gpuslice", standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except ParserError as error:
        command = " ".join(["gpuslice", *names]) if len(names) == 1 else "gpuslice"
        what = cast(Any, error).format_message()
        sys.stderr.write(f"gpuslice: {what}\ngpuslice: see `{command} --help`\n")
        sys.exit(2)
    except GpusliceError as error:
        sys.stderr.write(f"gpuslice: {error.message}\n")
        if error.remedy:
            sys.stderr.write(f"gpuslice: {error.remedy}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
