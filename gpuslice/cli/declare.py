"""What a command takes, declared at its parameters: ``Annotated[str, Option("--to", help=...)]``.

Both readers of command lines go by it, ``fast_parser`` and typer (``application``), and it needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints


class Option:
    """An option.

    Parameters
    ----------
    words
        What it is called; else ``--`` and the parameter's name.
    metavar, help
        What people are told of it.
    """

    def __init__(self, *words: str, metavar: str | None = None, help: str = "") -> None:
        self.words, self.metavar, self.help = words, metavar, help


class Argument:
    """An argument.

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
    """A parameter of a command.

    Attributes
    ----------
    kind
        Of its value, or of each of its values if there may be ``many``.
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
        """True if it is an option without a value."""
        return self.kind is bool

    def read(self, text: str) -> Any:
        """Return the value that ``text`` stands for. Raise ``ValueError`` if it stands for none."""
        if self.kind not in (str, int, float, Path) and not issubclass(self.kind, Enum):
            raise ValueError(f"no rule for a {self.kind.__name__}")
        return self.kind(text)


def parameters(command: Callable[..., object]) -> dict[str, Parameter]:
    """Return the parameters of ``command`` that are declared here, by name."""
    code = command.__code__
    optional = code.co_varnames[code.co_argcount - len(command.__defaults__ or ()) : code.co_argcount]
    found: dict[str, Parameter] = {}
    for name, hint in hints(command).items():
        declared = declaration(hint)
        if declared is None:
            continue
        kind, many = _kind(get_args(hint)[0])
        words = declared.words or (f"--{name.replace('_', '-')}",) if isinstance(declared, Option) else ()
        found[name] = Parameter(name, kind, many, name not in optional, words, declared)
    return found


def hints(command: Callable[..., object]) -> Mapping[str, Any]:
    """Return the evaluated annotations of ``command``."""
    return get_type_hints(command, include_extras=True)


def declaration(hint: Any) -> Option | Argument | None:
    """Return the ``Option`` or ``Argument`` in an annotation. Return None if it has none."""
    extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((extra for extra in extras if isinstance(extra, Option | Argument)), None)


def _kind(hint: Any) -> tuple[type, bool]:
    """Return the type of a value, and True if there may be several: str and True of ``list[str] | None``."""
    if get_origin(hint) in (UnionType, Union):
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    return (get_args(hint)[0], True) if get_origin(hint) is list else (hint, False)
