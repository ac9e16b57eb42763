"""Command lines that are read without the parser, whose import takes longer than all the rest.

It goes by the same declarations as the parser, and takes only what is exactly right and plain; everything
else (an unknown word, a value that looks like an option, ``--help``, shell completion) is left to the parser,
which has the texts. What both take, both understand alike; a test makes up command lines to see that.
See docs/decisions/command-line.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .declare import Argument, Parameter, parameters

#: Commands that need no parser, because all they take is declared by ``declare``.
COMMANDS = frozenset(
    {"run", "submit", "ps", "nodes", "show", "logs", "wait", "cancel", "suspend", "resume", "requeue"}
) | frozenset(
    {"migrate", "weight", "events", "down", "smi", "pause", "unpause", "drain", "undrain", "unreserve"}
)


def find(module: str, words: Sequence[str]) -> Callable[[], int] | None:
    """Parse ``words`` and return the command as a callable. Return None if only the parser can decide."""
    command = importlib.import_module(module).command
    given = read(parameters(command), words)
    return None if given is None else lambda: int(command(**given) or 0)


def read(taken: Mapping[str, Parameter], words: Sequence[str]) -> dict[str, Any] | None:
    """Return the values of the parameters that ``words`` set. Return None if they are not exactly right."""
    options = {word: parameter for parameter in taken.values() for word in parameter.words}
    arguments = [parameter for parameter in taken.values() if isinstance(parameter.declared, Argument)]
    given: dict[str, Any] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        option = options.get(name)
        if equals and option is not None and not name.startswith("--"):
            return None  # of -n=5 the parser takes "=5" for the value
        if option is not None and option.flag and not equals:
            given[option.name] = True
        elif option is not None and not option.flag and (equals or left):
            if not _set(given, option, value if equals else left.pop(0)):
                return None
        elif arguments and _is_rest(arguments[0], word, left):
            given[arguments.pop(0).name] = [word, *left]
            left = []
        elif not arguments or not word or not _set(given, _next(arguments), word):
            return None
    return None if any(one.required and one.name not in given for one in taken.values()) else given


def _next(arguments: list[Parameter]) -> Parameter:
    """Return the argument for the next word. Remove it from the list, unless it takes several words."""
    return arguments[0] if arguments[0].many else arguments.pop(0)


def _is_rest(argument: Parameter, word: str, left: Sequence[str]) -> bool:
    """Return True if ``argument`` takes ``word`` and all words after it, which are ``left``."""
    if not isinstance(argument.declared, Argument) or not argument.declared.rest:
        return False
    if word == "-m":  # to the parser an option like others; only what is none ends them
        return bool(left) and not left[0].startswith("-")
    return word == "--" or (bool(word) and not word.startswith("-"))


def _set(given: dict[str, Any], parameter: Parameter, text: str) -> bool:
    """Store the value that ``text`` stands for. Return False if only the full parser can read the text."""
    if not text or text.startswith("-"):
        return False
    try:
        value = parameter.read(text)
    except ValueError:
        return False
    if parameter.many:
        given.setdefault(parameter.name, []).append(value)
    else:
        given[parameter.name] = value
    return True
