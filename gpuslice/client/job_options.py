"""Requests for jobs as people write them: options of ``gpuslice submit``, and a ``job.toml``.

Both are made of the fields of ``JobRequest``. How the text of a value is read follows from the field's type
and the unit in its name. A wrong value is named as it was written: ``--max-steps``, or ``job.toml, line 3``.
"""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from gpuslice.config import parse_duration, parse_moment, parse_size
from gpuslice.errors import ConfigError, UsageError
from gpuslice.job_request import JobRequest, Option
from gpuslice.types import explain

_WHOLE = re.compile(r"[+-]?[0-9]{1,99}")
#: Characters of a wrong value that an error shows.
_SHOWN = 60
_REMEDY = "see `gpuslice submit --help`"


class Kind(NamedTuple):
    """How values of one kind are described, checked in a TOML file, and read from text.

    ``read`` raises ``ValueError`` for a text that is no such value, or says more by a ``ConfigError``.
    """

    said: str
    types: tuple[type, ...]
    read: Callable[[str], Any]


def _whole(text: str) -> int:
    if _WHOLE.fullmatch(text) is None:
        raise ValueError
    return int(text)


_SWITCH = Kind("true or false", (bool,), bool)
_LIST = Kind("a list of texts", (list,), str)
_TABLE = Kind("a table of texts", (dict,), str)
_KINDS: dict[Any, Kind] = {
    "s": Kind("a time", (str, int, float), parse_duration),
    "bytes": Kind("a size", (str, int), parse_size),
    bool: _SWITCH,
    int: Kind("a whole number", (int,), _whole),
    float: Kind("a number", (int, float), float),
    str: Kind("a text", (str,), str),
    Mapping: _TABLE,
    tuple: _LIST,
    "unix_s": Kind(
        "a local time as 20:00, or 2h", (str, int, float), lambda text: parse_moment(text, time.time())
    ),
}


class JobOption(NamedTuple):
    """One option of ``submit``: the field that it sets, its key in a ``job.toml``, and its kind."""

    field: msgspec.structs.FieldInfo
    key: str
    kind: Kind
    option: Option

    @property
    def flag(self) -> str:
        """The option's name on a command line, such as ``--max-steps``."""
        return f"--{self.key.replace('_', '-')}"

    @property
    def is_switch(self) -> bool:
        """True if the option has no value on a command line."""
        return self.kind is _SWITCH

    @property
    def is_list(self) -> bool:
        """True if the option is repeated, once for each value: ``--after a --after b``."""
        return self.kind is _LIST

    @property
    def is_table(self) -> bool:
        """True if the option is repeated, once for each variable: ``--env K=V``."""
        return self.kind is _TABLE

    @property
    def help(self) -> str:
        """The help text of the option, with its default."""
        default = self.field.default
        if not default or default is msgspec.NODEFAULT:
            return self.option.help
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        unit = "s" if self.kind is _KINDS["s"] else ""
        return f"{self.option.help} Default: {shown}{unit}."

    def from_words(self, given: Any) -> dict[str, Any]:
        """Return the request's fields that this option's values on a command line set.

        Raises
        ------
        UsageError
            If it is no value of this option.
        """
        if self.is_switch:
            return {self.field.name: True}
        if self.is_list:
            return self._read_all(given, self.flag)
        if not self.is_table:
            return self._read(given, self.flag)
        settings = [setting.partition("=") for setting in given]
        for key, equals, value in settings:
            if not equals or not key:
                raise UsageError(
                    f"{self.flag} {key}{equals}{value} is not KEY=VALUE",
                    f"write for instance {self.flag} LR=0.1",
                )
        return {self.field.name: {key: value for key, _, value in settings}}

    def from_toml(self, value: Any, where: str) -> dict[str, Any]:
        """Return the request's fields that a value of a TOML file sets. ``where`` names the value's place.

        Raises
        ------
        UsageError
            If it is no value of this option.
        """
        if type(value) not in self.kind.types and not (self.option.most and isinstance(value, str)):
            raise _wrong(where, self.kind.said, value)
        if isinstance(value, dict):
            for name, text in value.items():
                if not isinstance(text, str):
                    raise _wrong(f"{where}.{name}", 'a text in "quotes"', text)
        if isinstance(value, list):
            for text in value:
                if not isinstance(text, str):
                    raise _wrong(where, self.kind.said, value)
            return self._read_all(value, where)
        return {self.field.name: value} if isinstance(value, dict | bool) else self._read(str(value), where)

    def _read_all(self, texts: Sequence[str], where: str) -> dict[str, Any]:
        for text in texts:
            try:
                msgspec.convert([text], self.field.type)
            except msgspec.ValidationError as error:
                told = explain(error).partition(" ")[2]  # without the number of the value
                raise UsageError(f"{where}: {text!r} {told}", _REMEDY) from None
        return {self.field.name: tuple(texts)}

    def _read(self, text: str, where: str) -> dict[str, Any]:
        if not self.option.most:
            return {self.field.name: self._read_one(text, where)}
        least, colon, most = text.partition(":")
        return {
            self.field.name: self._read_one(least, where),
            self.option.most: self._read_one(most, where) if colon else 0,
        }

    def _read_one(self, text: str, where: str) -> Any:
        try:
            value = self.option.words[text] if text in self.option.words else self.kind.read(text)
            return msgspec.convert(value, self.field.type)
        except ConfigError as error:
            raise UsageError(f"{where}: {error.message}", error.remedy) from None
        except msgspec.ValidationError as error:
            raise UsageError(f"{where} {explain(error).removeprefix('it ')}", _REMEDY) from None
        except ValueError:
            raise _wrong(where, self.kind.said, text) from None


def job_options(request: type[msgspec.Struct] = JobRequest) -> dict[str, JobOption]:
    """Return the options of ``request``, by key."""
    options = {}
    for field in msgspec.structs.fields(request):
        for option in get_args(field.type)[1:] if get_origin(field.type) is Annotated else ():
            if isinstance(option, Option):
                unit = "unix_s" if field.name.endswith("_unix_s") else field.name.rpartition("_")[2]
                key = option.name or (field.name.removesuffix(f"_{unit}") if unit in _KINDS else field.name)
                options[key] = JobOption(field, key, _kind(field.type, unit), option)
    return options


def _kind(hint: Any, unit: str) -> Kind:
    while get_origin(hint) in (Annotated, Union, UnionType):
        hint = next(part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is Literal:
        known = get_args(hint)
        return Kind(f"one of {', '.join(known)}", (str,), lambda text: known[known.index(text)])
    return _KINDS[unit if unit in _KINDS else get_origin(hint) or hint]


def from_command_line(given: Mapping[str, Any], request: type[msgspec.Struct] = JobRequest) -> dict[str, Any]:
    """Return the request's fields that the options ``given`` set. Options that were not given are left out.

    Raises
    ------
    UsageError
        For a wrong value, naming the option.
    """
    options = job_options(request)
    fields: dict[str, Any] = {}
    for key, value in given.items():
        if value is not None and value is not False and value != ():
            fields |= options[key].from_words(value)
    return fields


def from_file(path: Path, request: type[msgspec.Struct] = JobRequest) -> tuple[list[str], dict[str, Any]]:
    """Return the command in a ``job.toml``, empty if it has none, and the fields that the file sets.

    Raises
    ------
    UsageError
        For an unknown key or a wrong value, naming its line.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}", "docs/submit.md has an example") from error
    options = job_options(request)
    command: list[str] = []
    fields: dict[str, Any] = {}
    for key, value in values.items():
        where = f"{path}{_line(text, key)}: {key}"
        if key == "command":
            command = _command(value, where)
        elif key in options:
            fields |= options[key].from_toml(value, where)
        else:
            from gpuslice.sched_core.options import nearest

            raise UsageError(f"{where} is not a key of a job", nearest(key, ["command", *options]))
    return command, fields


def _command(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise UsageError(
            f"{where} has to be a list of words", 'write for instance command = ["train.py", "--lr", "0.1"]'
        )
    return value


def _line(text: str, key: str) -> str:
    """Return where ``key`` stands in a TOML file, such as ``, line 3``; an empty text if it is not found."""
    name = f"""["']?{re.escape(key)}["']?"""
    found = re.search(rf"^[ \t]*(?:{name}[ \t]*[=.]|\[[ \t]*{name}[ \t]*[\].])", text, re.MULTILINE)
    return f", line {text.count(chr(10), 0, found.start()) + 1}" if found else ""


def _wrong(where: str, said: str, value: Any) -> UsageError:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return UsageError(f"{where} has to be {said}, not {shown}", _REMEDY)
