"""The command lines in the documents are such as the parser takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest
import typer.main

from gpuslice.cli import COMMANDS, application

from ..test_documents import PRESENT, ROOT

_LINE = re.compile(r"^    (?:.*\$\()?(gpuslice [a-z].*)$", re.MULTILINE)
#: What a synopsis has and a command line has not.
_SYNOPSIS = ("[", "…", "...", " | ")
#: Words in place of a number.
_NUMBER = re.compile(r"\b(?:PID|N)\b")


def command_lines(text: str) -> Iterator[list[str]]:
    """The commands of the indented lines of a document, word by word."""
    for line in _LINE.findall(text.replace("\\\n", " ")):
        code = _NUMBER.sub("1", line.partition(" #")[0].rstrip(")"))
        if not any(mark in code for mark in _SYNOPSIS):
            yield from (shlex.split(part) for part in re.split("; |&& ", code) if "gpuslice " in part)


def parse(words: list[str]) -> None:
    """Have the parser take a command line, and do nothing.

    Raises
    ------
    application.ParserError
        If it does not.
    """
    name = words[1]
    app = typer.main.get_command(application.build({name: COMMANDS[name]}))
    with app.make_context("gpuslice", words[1:]) as root:
        _, command, rest = app.resolve_command(root, words[1:])
        with command.make_context(name, rest, parent=root) as context:
            for value in context.params.values():
                # Of a command that takes all words from the script on: an option of its own is none of them.
                if isinstance(value, list) and re.match("--.|-[^m-]", (value or [""])[0]):
                    raise typer.BadParameter(f"unknown option {value[0]}")


EXAMPLES = [
    pytest.param(words, id=f"{path.relative_to(ROOT)}: {shlex.join(words)}")
    for path in PRESENT
    for words in command_lines(path.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("words", EXAMPLES)
def test_a_command_line_of_a_document_is_understood(words: list[str]) -> None:
    parse(words)


@pytest.mark.parametrize(
    "line", ["gpuslice migrate job cpu:0", "gpuslice ps --colour", "gpuslice run --nothing train.py"]
)
def test_the_rule_can_fail(line: str) -> None:
    ((words,),) = [list(command_lines(f"    {line}  # remark\n"))]
    with pytest.raises(application.ParserError):
        parse(words)
