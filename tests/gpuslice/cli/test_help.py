"""Every command explains itself."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer

from gpuslice.cli import COMMANDS, main
from gpuslice.cli.application import build


def parameters(command: Any) -> list[Any]:
    """Those of ``command`` and of all commands below it."""
    below = getattr(command, "commands", {}).values()
    return [*command.params, *(parameter for other in below for parameter in parameters(other))]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert f"gpuslice {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_no_help_is_taken_for_markup(name: str) -> None:
    """In the help of an option ``[cores]`` would vanish, and ``[/dev]`` ends the program."""
    for parameter in parameters(typer.main.get_command(build({name: COMMANDS[name]}))):
        assert not re.search(r"\[[a-z/#@]", getattr(parameter, "help", None) or ""), parameter.name
