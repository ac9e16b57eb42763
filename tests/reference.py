"""The list of commands and options in docs/reference.md, made from the command line itself.

``python -m tests.reference`` writes it anew.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import typer

from gpuslice.cli import COMMANDS
from gpuslice.cli.application import build

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"
BEGIN, END = "<!-- commands: begin -->", "<!-- commands: end -->"
#: An option that so many commands have is described once.
MANY = 10


def commands() -> str:
    """Return the Markdown of all commands, in the order of ``gpuslice --help``."""
    root: Any = typer.main.get_command(build(COMMANDS))
    leaves = [leaf for name, one in root.commands.items() for leaf in _leaves(f"gpuslice {name}", one)]
    times = Counter(row for _, command in leaves for row in _rows(command))
    common = [row for row, count in times.items() if count >= MANY]
    lines = ["### Options before the command", "", *_table(_rows(root))]
    lines += ["", "### Options of many commands", "", *_table(common)]
    for words, command in leaves:
        lines += _section(words, command, common)
    return "\n".join(lines).strip()


def commands_on(page: str) -> str:
    """Return what stands between the markers of ``page``."""
    return page.partition(BEGIN)[2].partition(END)[0].strip()


def renew() -> None:
    """Put the present list between the markers of docs/reference.md."""
    page = PAGE.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} lacks {BEGIN} or {END}; put both where the list shall be")
    PAGE.write_text(f"{before}{BEGIN}\n{commands()}\n{END}{after}", encoding="utf-8")


def _leaves(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield each command without sub-commands, with the words that call it."""
    below: dict[str, Any] = getattr(command, "commands", {})
    if not below:
        yield words, command
    for name, one in below.items():
        yield from _leaves(f"{words} {name}", one)


def _section(words: str, command: Any, common: Sequence[str]) -> list[str]:
    help_text = [" ".join(part.split()) for part in (command.help or "").split("\n\n")]
    arguments = " ".join(_argument(one) for one in command.params if one.param_type_name == "argument")
    usage = f"    {words} [OPTIONS] {arguments}".rstrip()
    lines = ["", f"### {words}", "", usage]
    for part in help_text:
        lines += ["", _cell(part)]
    rows = _rows(command)
    own = [row for row in rows if row not in common]
    also = ", ".join(row.split(" | ")[0].removeprefix("| ") for row in rows if row in common)
    lines += ["", *_table(own)] if own else []
    return lines + (["", f"Also: {also}."] if also else [])


def _argument(argument: Any) -> str:
    return argument.metavar or str(argument.name).upper()


def _rows(command: Any) -> list[str]:
    rows = [_row(one) for one in command.params if one.param_type_name == "option" and not one.hidden]
    return [row for row in rows if row]


def _table(rows: Sequence[str]) -> list[str]:
    return ["| option | |", "| --- | --- |", *rows]


def _row(option: Any) -> str:
    if option.name in ("install_completion", "show_completion"):
        return ""
    words = ", ".join([*option.opts, *option.secondary_opts])
    value = "" if option.is_flag else f" {option.metavar or _values(option)}"
    shown = (words + value).replace("|", "\\|")
    default = _text(option.default) if option.default and not option.is_flag else ""
    return f"| `{shown}` | {_cell(option.help or '')}{f' Default: {default}.' if default else ''} |"


def _values(option: Any) -> str:
    """Return the values that ``option`` may have, or its own word in capitals if they are not listed."""
    if isinstance(option.default, Enum):
        return "|".join(_text(one) for one in type(option.default))
    return str(option.opts[0]).lstrip("-").upper()


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def _cell(text: str) -> str:
    """Return ``text`` for Markdown: on one line, with words between backticks kept as they are."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(
        part if part.startswith("`") else part.replace("|", "\\|").replace("*", "\\*") for part in parts
    )


if __name__ == "__main__":
    renew()
