"""Find policies and placements by name, and build them from options written as text."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable, Mapping
from math import isfinite, isnan
from typing import Any, Literal, get_args, get_origin

import msgspec

from gpuslice.errors import ConfigError, GpusliceError, where_raised

#: Name -> module and class.
Table = Mapping[str, tuple[str, str]]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a remedy for an unknown name: the closest known one, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(name.strip().lower(), names, n=1, cutoff=0.4)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names)}" if names else "it takes none"


def find(kind: str, table: Table, name: str) -> Any:
    """Import and return the class that ``name`` stands for in ``table``.

    Raises
    ------
    ConfigError
        If ``table`` has no such name, or what it stands for cannot be imported; ``kind`` is what the
        message calls it.
    """
    if name not in table:
        # The published ones are for --peer.
        meant = [known for known in table if not known.startswith("published-")]
        raise ConfigError(f"there is no {kind} {name!r}", nearest(name, meant))
    module, class_name = table[name]
    try:
        return getattr(importlib.import_module(module), class_name)
    except Exception as error:
        raise ConfigError(
            f"{kind} {name} cannot be loaded from {module}:{class_name}: {error}",
            "mend or remove the distribution that names it",
        ) from error


def options_of(kind: str, table: Table, name: str) -> list[str]:
    """Return the names of the options that the class of ``name`` takes."""
    parameters = inspect.signature(find(kind, table, name)).parameters
    return [key for key in parameters if key != "placement"]


def build(kind: str, table: Table, name: str, options: Mapping[str, object], **ready: object) -> Any:
    """Make and return an object of the class that ``name`` stands for, with ``options``.

    Parameters
    ----------
    options
        Keyword arguments; texts are converted to the declared types, lists are written with commas.
    ready
        Further arguments, not from users; left out where the class does not take them or they are None.

    Raises
    ------
    ConfigError
        If there is no such name or option, or a value does not convert.
    """
    factory = find(kind, table, name)
    parameters = inspect.signature(factory, eval_str=True).parameters
    known = [key for key in parameters if key not in ready]
    arguments = {key: value for key, value in ready.items() if key in parameters and value is not None}
    for key, value in options.items():
        if key not in known:
            raise ConfigError(f"{kind} {name} has no option {key!r}", nearest(key, known))
        try:
            arguments[key] = _finite(_convert(value, parameters[key].annotation), parameters[key].default)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{key}={value} is not possible for {kind} {name}: {error}") from error
    try:
        return factory(**arguments)
    except GpusliceError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{kind} {name} cannot be made: {where_raised(error)}", "mend or remove the distribution it is of"
        ) from error


def _finite(value: object, default: object) -> object:
    """Return ``value``. Raise if it contains NaN, or infinity that is not the option's ``default``."""
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float) and not isfinite(number) and (isnan(number) or number != default):
            raise msgspec.ValidationError("not a finite number")
    return value


def _convert(value: object, wanted: Any) -> object:
    if isinstance(value, str) and get_origin(wanted) is tuple:
        value = tuple(_convert(item, get_args(wanted)[0]) for item in value.split(","))
    if wanted is float and isinstance(value, str):
        try:
            return float(value)
        except ValueError as error:
            raise msgspec.ValidationError("not a number") from error
    if get_origin(wanted) is Literal and value not in get_args(wanted):
        raise msgspec.ValidationError(nearest(str(value), get_args(wanted)))
    return msgspec.convert(value, wanted, strict=False)
