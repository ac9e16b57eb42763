"""Every command explains itself."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import typer

from gpuslice.cli import COMMANDS, main
from gpuslice.cli.application import build, outline


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


def test_the_outline_says_what_the_commands_say_of_themselves() -> None:
    outlined = typer.main.get_command(outline(COMMANDS)).commands  # type: ignore[attr-defined]
    built = typer.main.get_command(build(COMMANDS)).commands  # type: ignore[attr-defined]
    own = {name: " ".join(one.help.partition("\n\n")[0].split()) for name, one in built.items()}
    assert {name: one.short_help for name, one in outlined.items()} == own
    assert all(own.values())


def test_the_outline_imports_no_command() -> None:
    code = (
        "import sys; from gpuslice.cli import COMMANDS, main\n"
        "try: main(['--help'])\n"
        "except SystemExit: sys.exit(len({'rich', 'numpy', *COMMANDS.values()} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("words", [["--connect=tcp://127.0.0.1:1"], ["--connect", "tcp://127.0.0.1:1"]])
def test_a_scheduler_elsewhere_is_named_in_both_ways(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUSLICE_CONNECT", "")  # and taken back to what it was
    monkeypatch.delenv("GPUSLICE_CURVE_KEYS", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main([*words, "down"])
    assert "tcp://127.0.0.1:1 needs keys" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--connect", "--", "down"], ["--", "ps"], ["--curve-keys"]])
def test_no_command_line_does_nothing_and_says_so_to_nobody(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUSLICE_CONNECT", "")
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "gpuslice: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("ramdisk verify", "gpuslice ramdisk verify"),
        ("ramdisk ls --nothing", "gpuslice ramdisk ls"),
        ("ramdisk nothing", "gpuslice ramdisk"),
        ("wait --timeout", "gpuslice wait"),
        ("nothing", "gpuslice"),
    ],
)
def test_a_wrong_command_line_is_answered_with_the_help_of_its_own_command(
    words: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert capsys.readouterr().err.splitlines()[-1] == f"gpuslice: see `{command} --help`"
