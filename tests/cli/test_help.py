"""Help: by task, with examples, by ``-h`` as by ``--help``; and what is said of words that do not exist."""

from __future__ import annotations

import shlex

import pytest

from gpuslice.cli import COMMANDS, main
from gpuslice.cli.help_groups import GROUPS

from .test_documented_commands import parse


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    assert ended.value.code == code, err
    assert (err if code else out) != ""
    return err if code else out


def test_every_command_is_in_one_group() -> None:
    grouped = [name for group in GROUPS for name in group.commands]
    assert sorted(grouped) == sorted(COMMANDS)


@pytest.mark.parametrize("words", [(), ("-h",), ("--help",)])
def test_help_is_grouped_by_task_and_fits_a_screen(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    lines = said(capsys, *words).splitlines()
    assert max(map(len, lines)) <= 80
    for group in GROUPS:
        start = lines.index(f"{group.task}:")
        assert lines[start + 1] == f"  $ {group.example}"
        names = [line.split()[0] for line in lines[start + 2 : start + 2 + len(group.commands)]]
        assert names == list(group.commands), "each has one line"


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.task)
def test_the_examples_are_understood(group: object) -> None:
    assert isinstance(group, tuple)
    for line in str(group[1]).split(" && "):
        parse(shlex.split(line))


@pytest.mark.parametrize("name", [*COMMANDS, "ramdisk ls", "trace stats"])
def test_h_is_help_everywhere(capsys: pytest.CaptureFixture[str], name: str) -> None:
    words = name.split()
    assert said(capsys, *words, "-h") == said(capsys, *words, "--help")


def test_after_the_script_h_is_the_scripts_own() -> None:
    from gpuslice.cli import fast_parser
    from gpuslice.cli.declare import parameters
    from gpuslice.cli.run import command

    assert fast_parser.read(parameters(command), ["train.py", "-h"]) == {"words": ["train.py", "-h"]}


@pytest.mark.parametrize("name", ["ramdisk", "trace", "keys"])
def test_a_command_of_commands_alone_prints_its_help(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert said(capsys, name) == said(capsys, name, "--help")


@pytest.mark.parametrize(
    ("line", "what", "see"),
    [
        ("pss", "there is no command 'pss'. Did you mean 'ps'?", "gpuslice"),
        ("ramdisk lst", "there is no command 'lst'. Did you mean 'ls'?", "gpuslice ramdisk"),
        ("--versio", "unknown option --versio; did you mean --version?", "gpuslice"),
        ("ps --jso", "unknown option --jso; did you mean --json?", "gpuslice ps"),
        ("up --polcy rr", "unknown option --polcy; did you mean --policy?", "gpuslice up"),
        ("ramdisk ls --jsn", "unknown option --jsn; did you mean --json?", "gpuslice ramdisk ls"),
        ("run --devic cpu x.py", "unknown option --devic; did you mean --device?", "gpuslice run"),
        ("run --devic=cpu x.py", "unknown option --devic; did you mean --device?", "gpuslice run"),
        ("submit --devics 2 x.py", "unknown option --devics; did you mean --devices?", "gpuslice submit"),
        ("profile --stes 3 x.py", "unknown option --stes; did you mean --steps?", "gpuslice profile"),
        ("run -x x.py", "unknown option -x", "gpuslice run"),
        ("down --zzz", "unknown option --zzz", "gpuslice down"),
    ],
)
def test_unknown_words_are_named_with_what_may_be_meant(
    capsys: pytest.CaptureFixture[str], line: str, what: str, see: str
) -> None:
    assert said(capsys, *line.split(), code=2) == f"gpuslice: {what}\ngpuslice: see `{see} --help`\n"


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"ramdisk", "trace", "keys"}))
def test_every_command_knows_what_a_misspelt_option_means(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    told = said(capsys, name, "--hlp", code=2)
    assert told.startswith("gpuslice: unknown option --hlp; did you mean --help?\n")
