"""docs/reference.md lists every command, option and setting."""

from __future__ import annotations

from gpuslice.config import Settings, variable

from .reference import PAGE, commands, commands_on


def test_the_list_of_commands_is_that_of_the_command_line() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert commands_on(page) == commands(), f"run `python -m tests.reference`, which renews it in {PAGE.name}"


def test_every_setting_is_named() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in map(variable, Settings.__struct_fields__) if f"`{name}`" not in page] == []
