"""The parser: a typer application of the commands' own declarations."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from typer.core import TyperCommand

from . import declare
from .help_groups import GroupedCommands

#: What the parser raises for a wrong command line; typer exports only classes derived from it.
ParserError = cast(type[Exception], typer.BadParameter.__mro__[2])
#: The parser's messages, and what is said instead.
_PLAIN = [
    (re.compile(pattern), words)
    for pattern, words in (
        (r"^Got unexpected extra arguments?(?:\(s\))? \((.*)\)$", r"unexpected argument: \1"),
        (r"^Option '(.*)' requires an argument\.$", r"\1 needs a value"),
        (r"^Option '(.*)' does not take a value\.$", r"\1 takes no value"),
        (r"^Missing option '(.*)'\.$", r"\1 is missing"),
        (r"^Missing argument '(.*)'\.$", r"the argument \1 is missing"),
        (r"^No such command '(.*?)'\.", r"there is no command '\1'."),
    )
]
_WRONG_VALUE = re.compile(r"^Invalid value for '(.*?)': (.*)", re.DOTALL)
_KINDS: Mapping[type, str] = {int: "a whole number", float: "a number"}


def _version(show: bool) -> None:
    if show:
        from gpuslice.version import __version__

        typer.echo(f"gpuslice {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version."
    ),
    # Taken off before (``_named``); declared here for the help and for what is wrong with them.
    connect: str | None = typer.Option(
        None, metavar="tcp://HOST:PORT", help="Use the scheduler at this address [$GPUSLICE_CONNECT]."
    ),
    curve_keys: str | None = typer.Option(
        None, metavar="DIR", help="Keys for --connect [$GPUSLICE_CURVE_KEYS]."
    ),
) -> None:
    """Time-slice, suspend, migrate and pack PyTorch training jobs, bit for bit."""


def build(modules: Mapping[str, str]) -> typer.Typer:
    """Return the typer application with the commands in ``modules``, by name."""
    app = _empty()
    for name, path in modules.items():
        module = importlib.import_module(path)
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name, **_settings(module.command))(_typed(module.command))
    return app


def outline(modules: Mapping[str, str]) -> typer.Typer:
    """Return an application with only the names and the help of the commands in ``modules``.

    It is for a command line that names none of them.

    The modules are read and not imported: that takes longer than all the rest.
    """
    app = _empty()
    for name, path in modules.items():
        app.command(name, short_help=" ".join(_help(path).partition("\n\n")[0].split()))(_misplaced)
    return app


def _misplaced() -> None:
    raise typer.BadParameter("the command comes first, its options after it")


def _empty() -> typer.Typer:
    # Without rich, whose import would take half of the time of a `gpuslice --help`.
    return typer.Typer(
        name="gpuslice",
        cls=GroupedCommands,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        callback=_root,
    )


def _help(module: str) -> str:
    """Return the help of the command in ``module``: its docstring, or its ``typer.Typer``'s ``help``."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name="command"):
                return ast.get_docstring(node) or ""
            case ast.Assign(value=ast.Call(func=ast.Attribute(attr="Typer"), keywords=keywords)):
                return next(str(ast.literal_eval(one.value)) for one in keywords if one.arg == "help")
    return ""


class _Rest(TyperCommand):
    """A command whose last argument takes all remaining words, a leading ``--`` included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse ``args``. Double the first ``--`` beforehand, because the parser removes one."""
        if "--" in args:
            args.insert(args.index("--"), "--")
        left = super().parse_args(ctx, args)
        (name,) = (param.name for param in self.params if param.param_type_name == "argument")
        words: list[str] = list(ctx.params[name] or ())
        if words and words[0].startswith("-") and words[0] not in ("-", "-m", "--"):
            known = [word for param in self.get_params(ctx) for word in param.opts if word.startswith("--")]
            close = get_close_matches(words[0].partition("=")[0], known)
            raise typer.BadParameter(_unknown(words[0], close), ctx)
        if words[:1] != ["--"] and "--" in words:
            words.remove("--")
        ctx.params[name] = words
        return left

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options of each group under its name."""
        groups: dict[str, list[Any]] = {}
        for param in self.get_params(ctx):
            if param.param_type_name == "option" and (record := param.get_help_record(ctx)):
                groups.setdefault(getattr(param, "rich_help_panel", None) or "Options", []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


def _unknown(option: str, close: Sequence[str]) -> str:
    """Return the message for an option that does not exist. ``close`` are similar options, the best first."""
    name = option.partition("=")[0]
    return f"unknown option {name}; did you mean {close[0]}?" if close else f"unknown option {name}"


def _settings(command: Callable[..., object]) -> dict[str, Any]:
    """Return typer's settings for ``command``."""
    declared = [parameter.declared for parameter in declare.parameters(command).values()]
    if not any(isinstance(one, declare.Argument) and one.rest for one in declared):
        return {}
    return {
        "cls": _Rest,
        "context_settings": {"allow_interspersed_args": False, "ignore_unknown_options": True},
    }


def _typed(command: Any) -> Callable[..., Any]:
    """Return ``command`` with annotations that typer understands."""

    @wraps(command)
    def twin(**given: Any) -> Any:
        return command(**given)

    twin.__annotations__ = {name: _hint(hint) for name, hint in declare.hints(command).items()}
    taken = inspect.signature(command)
    parameters = [one.replace(annotation=twin.__annotations__[one.name]) for one in taken.parameters.values()]
    vars(twin)["__signature__"] = taken.replace(parameters=parameters)
    return twin


def _hint(hint: Any) -> Any:
    match declare.declaration(hint):
        case declare.Option() as option:
            typed = typer.Option(
                *option.words, metavar=option.metavar, help=option.help, rich_help_panel=option.group
            )
        case declare.Argument(rest=True) as argument:
            typed = typer.Argument(metavar=argument.metavar, show_default=False)
        case declare.Argument() as argument:
            typed = typer.Argument(
                metavar=argument.metavar, help=argument.help, autocompletion=argument.complete
            )
        case None:
            return hint
    return Annotated[get_args(hint)[0], typed]


def run(modules: Mapping[str, str], arguments: Sequence[str]) -> int:
    """Parse ``arguments``, run their command and return the exit code.

    Parameters
    ----------
    modules
        The module of the command that ``arguments`` name; of all commands if they name none.
    """
    app = build(modules) if len(modules) == 1 else outline(modules)
    if not arguments or (len(arguments) == 1 and app.registered_groups):
        arguments = [*arguments, "--help"]
    try:
        # Not standalone: the parser would print a box of many lines where one says it all.
        status = app(args=list(arguments), prog_name="gpuslice", standalone_mode=False)
    except ParserError as error:
        command = " ".join(["gpuslice", *modules]) if len(modules) == 1 else "gpuslice"
        if context := getattr(error, "ctx", None):  # of the command below it, as `gpuslice ramdisk verify`
            command = context.command_path
        what = _message(error, arguments)
        sys.stderr.write(f"gpuslice: {what}\ngpuslice: see `{command} --help`\n")
        return 2
    return status if isinstance(status, int) else 0


def _message(error: Exception, arguments: Sequence[str]) -> str:
    """Return what is wrong with a command line, and the option or command that may have been meant."""
    found = cast(Any, error)
    if hasattr(error, "possibilities"):  # an option that does not exist; typer exports no class for it
        return _unknown(found.option_name, found.possibilities or ())
    if isinstance(error, typer.BadParameter) and found.param is None:
        return str(found.message)
    message = str(found.format_message())
    for pattern, words in _PLAIN:
        message = pattern.sub(words, message)
    if (wrong := _WRONG_VALUE.match(message)) is None:
        return message
    name, kind = wrong[1], _kind_of(found)
    given = [
        word.partition("=")[2] or after
        for word, after in zip(arguments, [*arguments[1:], ""], strict=True)
        if word.partition("=")[0] in found.param.opts and name.startswith("-")
    ]
    value = f", not {given[-1]!r}" if given else ""
    return f"{name} has to be {kind}{value}" if kind else f"{name}: {wrong[2]}"


def _kind_of(error: Any) -> str | None:
    """Return in words what the values of the wrong parameter have to be; None if there is no word for it."""
    hint = declare.hints(inspect.unwrap(error.ctx.command.callback))[error.param.name]
    kind, _ = declare.kind_of(get_args(hint)[0])
    if issubclass(kind, Enum):
        return " or ".join(str(one.value) for one in kind)
    return _KINDS.get(kind)
