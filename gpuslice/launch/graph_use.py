"""A search of a script's source for CUDA graphs, which only the vmm route can move."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from gpuslice.launch.script_source import syntax_of

#: Names in torch that record graphs, and modes of ``torch.compile`` that record graphs.
_NAMES = {"CUDAGraph", "make_graphed_callables"}
_MODES = {"reduce-overhead", "max-autotune", "cudagraphs", "triton.cudagraphs"}


def find_graph_use(words: Sequence[str]) -> str:
    """Return where a command's scripts or their modules record CUDA graphs: ``train.py:12``; else "".

    Parameters
    ----------
    words
        As ``gpuslice run`` has them: a script, ``-m module``, or ``--`` and a command.
    """
    for path, node in syntax_of(words):
        if _records(node):
            return f"{path.name}:{node.lineno}"  # type: ignore[attr-defined]
    return ""


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
