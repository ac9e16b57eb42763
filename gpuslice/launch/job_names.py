"""Names of jobs made from the arguments of their script: ``k-{fold}`` for ``train.py --fold 3``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpuslice.errors import UsageError

_FIELD = re.compile(r"\{([^{}]*)\}")
#: ``--fold 3``, ``--fold=3`` and ``-f 3``; ``fold=3`` as in Hydra.
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_ASSIGNMENT = re.compile(r"\+{0,2}([A-Za-z][\w.]*)=(.*)", re.DOTALL)
_NUMBER = re.compile(r"-\.?\d.*", re.DOTALL)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")


def expand(name: str, words: Sequence[str]) -> str:
    """Return a job's name with each ``{option}`` replaced by that option's value.

    Parameters
    ----------
    name
        The name, with fields or without.
    words
        The command. If an option is given twice, its last value counts.

    Raises
    ------
    UsageError
        If the command has no such option. The error names its options.
    """
    if "{" not in name:
        return name
    values = options(words)

    def value(field: re.Match[str]) -> str:
        found = values.get(_plain(field[1]))
        if found is None:
            known = ", ".join(f"{{{one}}}" for one in values)
            raise UsageError(
                f"the job's name {name!r} has the field {field[0]}, but the command gives no --{field[1]}",
                f"it has {known}" if known else "it has no options with a value",
            )
        return _NOT_IN_NAMES.sub("-", found)

    return _FIELD.sub(value, name)


def options(words: Sequence[str]) -> dict[str, str]:
    """Return the values of a command's options by name. ``_`` replaces ``-`` in the names."""
    found: dict[str, str] = {}
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if option := _OPTION.fullmatch(word):
            value = option[2] if option[2] is not None else _value(following)
            if value:
                found[_plain(option[1])] = value
        elif (assignment := _ASSIGNMENT.fullmatch(word)) and assignment[2]:
            found[_plain(assignment[1])] = assignment[2]
    return found


def differing_options(words: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the names of options in ``words`` whose values differ from those in ``others``."""
    there = options(others)
    return [name for name, value in options(words).items() if there.get(name) != value]


def _value(word: str) -> str:
    """Return ``word`` if it can be the value of the option before it, else an empty text."""
    return "" if word.startswith("-") and not _NUMBER.fullmatch(word) else word


def _plain(name: str) -> str:
    return name.replace("-", "_")
