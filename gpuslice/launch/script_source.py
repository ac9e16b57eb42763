"""The source of a command's scripts and of their own modules. Nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

#: Most files to read: enough for a script's own modules, but not for a whole library beside it.
_MOST_FILES = 100


def syntax_of(words: Sequence[str]) -> Iterator[tuple[Path, ast.AST]]:
    """Yield all syntax nodes of a command's scripts and of the modules beside them, file by file.

    Parameters
    ----------
    words
        As ``gpuslice run`` has them: a script, ``-m module``, or ``--`` and a command.
    """
    waiting = list(_scripts(words))
    seen = set(waiting)
    while waiting and len(seen) <= _MOST_FILES:
        path = waiting.pop(0)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue  # the interpreter reports the error when it runs the file
        for node in ast.walk(tree):
            yield path, node
            for name in imported(node):
                module = path.parent.joinpath(*name.split("."))
                for other in (module.with_suffix(".py"), module / "__init__.py"):
                    if other not in seen and other.is_file():
                        seen.add(other)
                        waiting.append(other)


def imported(node: ast.AST) -> Iterator[str]:
    """Yield the modules that a node imports, and the names that it imports from them."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), level=level, names=names) if level <= 1:
            yield module
            yield from (f"{module}.{alias.name}" for alias in names)


def _scripts(words: Sequence[str]) -> Iterator[Path]:
    for before, word in zip(["", *words], words, strict=False):
        if before == "-m":
            yield Path(*word.split(".")).with_suffix(".py")
        elif word.endswith(".py"):
            yield Path(word)
