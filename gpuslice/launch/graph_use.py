"""Whether a script records CUDA graphs, as its source says; only the vmm route can take those along."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

#: Names of torch that record graphs, and modes of ``torch.compile`` that do.
_NAMES = {"CUDAGraph", "make_graphed_callables"}
_MODES = {"reduce-overhead", "max-autotune", "cudagraphs", "triton.cudagraphs"}
#: A script's own modules are looked through, too; not a whole library that happens to lie beside it.
_MOST_FILES = 100


def find_graph_use(words: Sequence[str]) -> str:
    """Where a command's scripts, or modules beside them, record graphs: ``train.py:12``; empty if nowhere.

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
            continue  # whoever executes it will say what is wrong
        for node in ast.walk(tree):
            if _records(node):
                return f"{path.name}:{node.lineno}"  # type: ignore[attr-defined]
            for name in _imported(node):
                module = path.parent.joinpath(*name.split("."))
                for other in (module.with_suffix(".py"), module / "__init__.py"):
                    if other not in seen and other.is_file():
                        seen.add(other)
                        waiting.append(other)
    return ""


def _scripts(words: Sequence[str]) -> Iterator[Path]:
    for before, word in zip(["", *words], words, strict=False):
        if before == "-m":
            yield Path(*word.split(".")).with_suffix(".py")
        elif word.endswith(".py"):
            yield Path(word)


def _records(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr="graph", value=ast.Attribute(attr="cuda") | ast.Name(id="cuda")):
            return True
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name in _NAMES
        case ast.Constant(value=str(value)):
            return value in _MODES
        case _:
            return False


def _imported(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), level=level) if level <= 1:
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
