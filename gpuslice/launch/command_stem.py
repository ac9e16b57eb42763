"""The stem of a job's id, taken from the name of the script that its command runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from gpuslice.launch.sitedir.sitecustomize import LAUNCHERS, program_of

_PYTHON = re.compile(r"(?:python|pypy)[0-9.]*")
_SHELLS = frozenset({"sh", "bash", "dash", "ksh", "zsh"})
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
#: Options by which torchrun and other launchers get a module's name.
_MODULE_OPTIONS = frozenset({"-m", "--module"})
_SCRIPTS = (".py", ".pyc", ".sh")
#: Separators of commands in a shell's line.
_SEPARATOR = re.compile(r"[;&|()]+")
_KEYWORDS = frozenset(
    {"if", "then", "else", "elif", "do", "while", "until", "!", "{", "exec", "time", "nohup"}
)
#: Commands of a shell that train nothing.
_BUILTINS = frozenset({"cd", "export", "set", "source", ".", "for", "ulimit", "trap", "echo", "mkdir", "rm"})
_MOST_CHARACTERS = 50


def stem(words: Sequence[str]) -> str:
    """Return a name for a command's job: the name of its script or module, else of the command.

    Parameters
    ----------
    words
        As ``gpuslice submit`` has them: a script, ``-m module``, or ``--`` and a command.
    """
    if words[0] == "-m":
        found = _module(words[1])
    elif words[0] == "--":
        command = words[1:]
        found = _script(command) or PurePath(next(_plain(command), command[0])).stem
    else:
        found = _file(words[0])
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", found).lstrip("_.-")[:_MOST_CHARACTERS] or "job"


def _script(command: Sequence[str]) -> str:
    """Return the name of the script or module that a command runs; empty if none is found."""
    for number, word in enumerate(command):
        rest = command[number:]
        if _PYTHON.fullmatch(PurePath(word).name):
            return _of_python(rest)
        if PurePath(word).name in _SHELLS:
            return _of_shell(rest)
        if word in _MODULE_OPTIONS and rest[1:]:
            return _module(rest[1])
        if word.endswith(_SCRIPTS):
            return _file(word)
    return ""


def _of_python(command: Sequence[str]) -> str:
    flag, program = program_of(command)
    if flag == "c" or not program:
        return ""
    if flag == "m":
        arguments = command[list(command).index(program) + 1 :] if program in command else ()
        return (program in LAUNCHERS and _script(arguments)) or _module(program)
    return _file(program)


def _of_shell(command: Sequence[str]) -> str:
    """Return the name of the script or command that a shell command runs; empty if none is found."""
    for word, following in zip(command[1:], [*command[2:], ""], strict=True):
        if word.startswith("-") and word.endswith("c"):
            lines = list(_simple_commands(following))
            scripts = filter(None, map(_script, lines))
            first = next((line[0] for line in lines if line[0] not in _BUILTINS), "")
            return next(scripts, PurePath(first).stem)
        if not word.startswith("-"):
            return _file(word)
    return ""


def _simple_commands(line: str) -> Iterator[list[str]]:
    """Yield the commands of a shell's line, without the variables and keywords before each."""
    lexer = shlex.shlex(line.replace("\n", ";"), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        tokens = list(lexer)
    except ValueError:  # such as a quote that is not closed: the shell reports it
        tokens = line.split()
    command: list[str] = []
    for token in [*tokens, ";"]:
        if not _SEPARATOR.fullmatch(token):
            command.append(token)
            continue
        if plain := list(_plain(command)):
            yield plain
        command = []


def _plain(command: Sequence[str]) -> Iterator[str]:
    """Yield a command's words from its name on, without the variables, keywords and ``env`` before it."""
    begun = False
    for word in command:
        before = word in _KEYWORDS or word == "env" or _ASSIGNMENT.fullmatch(word)
        if begun or not before:
            begun = True
            yield word


def _module(name: str) -> str:
    return name.removesuffix(".__main__").rpartition(".")[2]


def _file(path: str) -> str:
    pure = PurePath(path)
    return pure.parent.name if pure.name == "__main__.py" else pure.stem
