"""The parser: a typer application of the commands' own declarations."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import typer

#: What the parser raises for a wrong command line; typer exports only classes derived from it.
ParserError = cast(type[Exception], typer.BadParameter.__mro__[2])


def _version(show: bool) -> None:
    if show:
        from gpuslice import __version__

        typer.echo(f"gpuslice {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version."
    ),
    # Taken off before (``_named``); declared here for the help and for what is wrong with them.
    connect: str | None = typer.Option(
        None, metavar="tcp://HOST:PORT", help="A scheduler elsewhere [$GPUSLICE_CONNECT]."
    ),
    curve_keys: str | None = typer.Option(None, metavar="DIR", help="Keys for that [$GPUSLICE_CURVE_KEYS]."),
) -> None:
    """Time-slice, suspend, migrate and pack PyTorch training jobs, bit for bit."""


def build(modules: Mapping[str, str]) -> typer.Typer:
    """The typer application with the commands in ``modules``, by name."""
    app = typer.Typer(name="gpuslice", no_args_is_help=True, pretty_exceptions_enable=False, callback=_root)
    for name, path in modules.items():
        module = importlib.import_module(path)
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            settings = getattr(module, "CONTEXT_SETTINGS", None)
            cls = getattr(module, "CommandClass", None)
            app.command(name, cls=cls, context_settings=settings)(module.command)
    return app


def run(modules: Mapping[str, str], arguments: Sequence[str]) -> int:
    """Parse and do what ``arguments`` say; returns the exit code."""
    try:
        # Not standalone: the parser would print a box of many lines where one says it all.
        status = build(modules)(args=list(arguments), prog_name="gpuslice", standalone_mode=False)
    except ParserError as error:
        command = " ".join(["gpuslice", *modules]) if len(modules) == 1 else "gpuslice"
        what = cast(Any, error).format_message()
        sys.stderr.write(f"gpuslice: {what}\ngpuslice: see `{command} --help`\n")
        return 2
    return status if isinstance(status, int) else 0
