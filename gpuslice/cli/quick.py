"""Command lines that are understood without the parser, whose import takes longer than all the rest.

Only what is exactly right is taken; everything else (an unknown word, ``--help``, shell completion) is left
to the parser, which has the texts. A test holds that both know the same options.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Form:
    """The options of one command, by the parameter of the function in ``talk`` that they set.

    Attributes
    ----------
    flags
        Options without a value.
    values
        Options with one.
    arguments
        Parameters of the arguments, all required.
    required
        Parameters of options that must be there.
    """

    flags: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()


_WHERE = {"--state-dir": "state_dir"}
_JOB = ("job",)

FORMS: dict[str, Form] = {
    "ps": Form({"--json": "as_json", "--watch": "watch"}, _WHERE),
    "logs": Form({"--follow": "follow", "-f": "follow", "--err": "stderr"}, _WHERE, _JOB),
    "wait": Form({}, {"--timeout": "timeout", **_WHERE}, _JOB),
    "cancel": Form({}, _WHERE, _JOB),
    "suspend": Form({}, _WHERE, _JOB),
    "resume": Form({}, _WHERE, _JOB),
    "migrate": Form({}, {"--to": "to", **_WHERE}, _JOB, frozenset({"to"})),
    "weight": Form({}, _WHERE, ("job", "weight")),
    "events": Form({"--follow": "follow", "-f": "follow", "--json": "as_json"}, _WHERE),
    "down": Form({"--drain": "drain"}, _WHERE),
}


def find(words: Sequence[str]) -> Callable[[], int] | None:
    """What ``words`` ask for, ready to be called; ``None``: ask the parser."""
    if not words or words[0] not in FORMS:
        return None
    given = parse(FORMS[words[0]], words[1:])
    if given is None:
        return None
    act = getattr(importlib.import_module("gpuslice.cli.talk"), words[0])
    return lambda: int(act(**given))


def parse(form: Form, words: Sequence[str]) -> dict[str, str | bool] | None:
    """Parameters from ``words``; ``None`` if they are not exactly of this form."""
    given: dict[str, str | bool] = {}
    arguments = list(form.arguments)
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if word in form.flags:
            given[form.flags[word]] = True
        elif name in form.values and (equals or left):
            value = value if equals else left.pop(0)
            if not value or value.startswith("-"):
                return None
            given[form.values[name]] = value
        elif arguments and word and not word.startswith("-"):
            given[arguments.pop(0)] = word
        else:
            return None
    return None if arguments or form.required - given.keys() else given
