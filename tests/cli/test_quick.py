"""Command lines that do without the parser: they mean the same, and load nothing heavy."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest
import typer.main

from gpuslice.cli import COMMANDS, quick, talk

HEAVY = ("typer", "rich", "pydantic", "torch", "numpy", "numba", "prometheus_client", "asyncio")


def parsed(name: str) -> dict[str, Any]:
    """The options that the parser knows of a command, by word."""
    application = typer.Typer()
    application.command()(importlib.import_module(COMMANDS[name]).command)
    command = typer.main.get_command(application)
    return {word: param for param in command.params for word in param.opts}


@pytest.mark.parametrize("name", quick.FORMS)
def test_both_parsers_know_the_same_options(name: str) -> None:
    form = quick.FORMS[name]
    known = parsed(name)
    words = {word for word in known if word.startswith("-") and not word.endswith("-completion")}
    assert words == {*form.flags, *form.values}
    assert {known[word].name for word in words} == {*form.flags.values(), *form.values.values()}
    assert {word for word in form.flags if known[word].is_flag} == set(form.flags)
    assert {word for word in known if not word.startswith("-")} == set(form.arguments)
    taken = inspect.signature(getattr(talk, name)).parameters
    assert {*form.flags.values(), *form.values.values(), *form.arguments} == set(taken)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], {}),
        (["--json"], {"as_json": True}),
        (["--state-dir", "d", "--watch"], {"state_dir": "d", "watch": True}),
        (["--state-dir=d"], {"state_dir": "d"}),
        (["--help"], None),
        (["--state-dir"], None),
        (["--state-dir", "--json"], None),
        (["--state-dir="], None),
        (["--jso"], None),
        (["--json=1"], None),
        (["more"], None),
    ],
)
def test_what_is_not_exactly_right_is_left_to_the_parser(words: list[str], given: object) -> None:
    assert quick.parse(quick.FORMS["ps"], words) == given


def test_arguments_may_stand_anywhere_and_are_required() -> None:
    form = quick.FORMS["wait"]
    wanted = {"job": "a", "timeout": "1s"}
    assert quick.parse(form, ["a", "--timeout", "1s"]) == wanted
    assert quick.parse(form, ["--timeout", "1s", "a"]) == wanted
    assert quick.parse(form, ["--timeout", "1s"]) is None
    assert quick.parse(form, ["a", "b"]) is None


def test_nothing_heavy_is_imported_for_an_answer() -> None:
    code = (
        "import sys\n"
        "from gpuslice.cli import main, quick\n"
        "assert quick.find(['ps', '--json']) is not None\n"
        f"sys.exit(', '.join(name for name in {HEAVY} if name in sys.modules) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60.0, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
