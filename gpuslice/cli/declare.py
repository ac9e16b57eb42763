"""What a command takes, declared at its parameters: ``Annotated[str, Option("--to", help=...)]``.

Both readers of command lines go by it, ``fast_parser`` and typer (``application``), and it needs neither.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints


class Option:
    """The declaration of an option: its names, its help and how its text is read.

    Parameters
    ----------
    words
        The option's names; by default ``--`` and the parameter's name.
    metavar, help
        What people are told of it.
    group
        The part of the help that has it.
    """

    def __init__(
        self, *words: str, metavar: str | None = None, help: str = "", group: str = "Options"
    ) -> None:
        self.words, self.metavar, self.help, self.group = words, metavar, help, group


class Argument:
    """The declaration of an argument: its name, its help and how its text is read.

    Parameters
    ----------
    complete
        What may be meant by its beginning, for shells.
    rest
        Whether everything from here on is its, options too.
    """

    def __init__(
        self,
        *,
        metavar: str,
        help: str = "",
        complete: Callable[[str], list[str]] | None = None,
        rest: bool = False,
    ) -> None:
        self.metavar, self.help, self.complete, self.rest = metavar, help, complete, rest


class Parameter(NamedTuple):
    """A parameter of a command, with its declaration and its type.

    Attributes
    ----------
    kind
        Type of the value, or of each value if there may be ``many``.
    words
        What the option is called; none for an argument.
    """

    name: str
    kind: type
    many: bool
    required: bool
    words: tuple[str, ...]
    declared: Option | Argument

    @property
    def flag(self) -> bool:
        """True if the parameter is an option without a value."""
        return self.kind is bool

    def read(self, text: str) -> Any:
        """Return the value that ``text`` stands for. Raise ``ValueError`` if it stands for none."""
        if self.kind not in (str, int, float, Path) and not issubclass(self.kind, Enum):
            raise ValueError(f"no rule for a {self.kind.__name__}")
        return self.kind(text)


def parameters(command: Callable[..., object]) -> dict[str, Parameter]:
    """Return the declared parameters of ``command``, by name."""
    taken = inspect.signature(command).parameters
    found: dict[str, Parameter] = {}
    for name, hint in hints(command).items():
        declared = declaration(hint)
        if declared is None:
            continue
        kind, many = kind_of(get_args(hint)[0])
        words = declared.words or (f"--{name.replace('_', '-')}",) if isinstance(declared, Option) else ()
        found[name] = Parameter(
            name, kind, many, taken[name].default is inspect.Parameter.empty, words, declared
        )
    return found


def with_options(options: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Declare the options of a command that takes any keywords: an annotation for each name.

    They follow its arguments. A value is None if the option is not given.
    """

    def declared(command: Any) -> Any:
        known = {**hints(command), **options}
        own = [
            one for one in inspect.signature(command).parameters.values() if one.kind is not one.VAR_KEYWORD
        ]
        taken = [one for one in own if isinstance(declaration(known[one.name]), Argument)]
        rest = [one.replace(kind=one.KEYWORD_ONLY) for one in own if one not in taken]
        taken += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in options]
        taken += rest
        command.__annotations__ = {one.name: known[one.name] for one in taken}
        command.__signature__ = inspect.Signature(taken)
        return command

    return declared


def hints(command: Callable[..., object]) -> Mapping[str, Any]:
    """Return the evaluated annotations of ``command``."""
    return get_type_hints(command, include_extras=True)


def declaration(hint: Any) -> Option | Argument | None:
    """Return the ``Option`` or ``Argument`` in an annotation. Return None if it has none."""
    extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((extra for extra in extras if isinstance(extra, Option | Argument)), None)


def kind_of(hint: Any) -> tuple[type, bool]:
    """Return the type of a value, and True if there may be several: str and True of ``list[str] | None``."""
    if get_origin(hint) in (UnionType, Union):
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    return (get_args(hint)[0], True) if get_origin(hint) is list else (hint, False)
