"""Command lines that do without the parser: they mean the same, and load nothing heavy."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from functools import wraps
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.cli import COMMANDS, application, fast_parser
from gpuslice.cli.declare import parameters

from ..patience import PATIENCE_S

HEAVY = ("typer", "rich", "pydantic", "torch", "numpy", "numba", "prometheus_client", "asyncio")
#: What may stand on a command line besides options: values of every type, and what is no value.
WORDS = ["train.py", "-m", "--", "5", "0.5", "leave", "kill", "K=V", "a b", "60s", "", "-x", "--no", "--help"]


class Both:
    """One command, as both readers understand it; it only notes what it was called with."""

    def __init__(self, name: str) -> None:
        command: Any = importlib.import_module(COMMANDS[name]).command
        defaults = {one.name: one.default for one in inspect.signature(command).parameters.values()}
        self.calls: list[dict[str, Any]] = []

        @wraps(command)
        def noted(**given: Any) -> None:
            self.calls.append(defaults | given)

        self.command = noted
        self.options = [word for one in parameters(command).values() for word in one.words]
        app = typer.Typer(add_completion=False)
        app.command(**application._settings(self.command))(application._typed(self.command))
        self.parser = typer.main.get_command(app)

    def quick(self, words: list[str]) -> dict[str, Any] | None:
        found = fast_parser.read(parameters(self.command), words)
        if found is None:
            return None
        self.command(**found)
        return self.calls.pop()

    def parsed(self, words: list[str]) -> dict[str, Any]:
        self.parser.main(args=words, prog_name="command", standalone_mode=False)
        return self.calls.pop()


BOTH = {name: Both(name) for name in sorted(fast_parser.COMMANDS)}


@pytest.mark.parametrize("name", sorted(fast_parser.COMMANDS))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_read_quickly_is_read_as_the_parser_reads_it(name: str, data: st.DataObject) -> None:
    both = BOTH[name]
    options = [*both.options, *(f"{word}={value}" for word in both.options for value in ("5", "leave", ""))]
    words = data.draw(st.lists(st.sampled_from([*options, *WORDS]), max_size=6))
    found = both.quick(words)
    if found is not None:
        assert both.parsed(words) == found


@pytest.mark.parametrize(
    "line",
    [
        "ps",
        "ps --json --state-dir d --watch",
        "ps sweep-* --user u --state queued,running",
        "logs -n 20 job",
        "cancel --mine sweep-*",
        "logs -f --err job",
        "wait job --timeout=1s",
        "migrate job --to cuda:1",
        "weight job 2",
        "down --drain",
        "run train.py --lr 0.1 -- x",
        "run --device cpu -- torchrun train.py -- x",
        "submit --devices 2 --weight 0.5 --env A=1 --env B=2 --on-boundary-timeout kill -m train --name x",
        "submit --memory 4G -- python -c pass -- --name y",
    ],
)
def test_ordinary_lines_are_read_quickly(line: str) -> None:
    name, *words = line.split()
    found = BOTH[name].quick(words)
    assert found is not None
    assert BOTH[name].parsed(words) == found


@pytest.mark.parametrize(
    "line",
    [
        "ps --help",
        "ps --jso",
        "ps --json=1",
        "nodes more",
        "logs -n=5 job",
        "ps --state-dir",
        "ps --state-dir --json",
        "ps --state-dir=",
        "wait",
        "weight a 2 b",
        "migrate job",
        "run --checkpoint-every two train.py",
        "submit -x train.py",
        "submit -m --name x",
    ],
)
def test_what_is_not_exactly_right_is_left_to_the_parser(line: str) -> None:
    name, *words = line.split()
    assert BOTH[name].quick(words) is None


@pytest.mark.parametrize("name", sorted(fast_parser.COMMANDS))
def test_everything_that_a_quick_command_takes_is_declared(name: str) -> None:
    command: Any = importlib.import_module(COMMANDS[name]).command
    assert set(parameters(command)) == {*command.__annotations__} - {"return"}


@pytest.mark.parametrize("name", sorted(fast_parser.COMMANDS))
def test_nothing_heavy_is_imported_for_an_answer(name: str) -> None:
    words = {"run": ["x"], "submit": ["x"], "migrate": ["j", "--to", "d"], "weight": ["j", "2"]}
    line = words.get(name, [] if name in ("ps", "nodes", "events", "down", "smi") else ["j"])
    code = (
        "import sys\n"
        "from gpuslice.cli import COMMANDS, fast_parser\n"
        f"assert fast_parser.find(COMMANDS[{name!r}], {line!r}) is not None\n"
        f"sys.exit(', '.join(name for name in {HEAVY} if name in sys.modules) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
