"""A process that is started before its turn: it imports torch, then waits at its gate until it may go on.

See ``sched_core.nodes.started_ahead``. The process has no lease and has not greeted. Until it may go on,
only imports of its script run: a process of the same job may still train elsewhere.
"""

from __future__ import annotations

import ast
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from gpuslice.config import GATE, GO, WAITS

#: Exit code of a process that is given up: it has done nothing of its job (EX_TEMPFAIL).
_GIVEN_UP = 75


def begin(flag: str, program: str) -> None:
    """Wait now, before the script, if that does more than import before it has imported torch.

    Parameters
    ----------
    flag, program
        What the interpreter executes: "" and a script, or another flag.
    """
    if flag or not _imports_torch_first(Path(program)):
        wait()


def is_ahead() -> bool:
    """Return True if this process was started before its turn and has not waited yet."""
    return GATE in os.environ


def wait() -> None:
    """Wait at the gate, if there is one, until this process may go on. End it if it is given up."""
    path = os.environ.pop(GATE, "")
    if not path:
        return
    try:
        gate = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        os._exit(_GIVEN_UP)
    os.pwrite(gate, WAITS, 1)
    fcntl.flock(gate, fcntl.LOCK_SH)
    if os.pread(gate, 1, 0) != GO:
        os._exit(_GIVEN_UP)
    os.close(gate)
    with suppress(FileNotFoundError):
        os.unlink(path)


def _imports_torch_first(script: Path) -> bool:
    """Return True if ``script`` imports torch before it does anything but import or set variables."""
    try:
        body = ast.parse(script.read_bytes()).body
    except (OSError, ValueError, SyntaxError):
        return False
    for node in body:
        match node:
            case ast.Import(names=names) if any(_is_torch(name.name) for name in names):
                return True
            case ast.ImportFrom(module=str(module), level=0) if _is_torch(module):
                return True
            case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
                pass
            case ast.Assign(targets=[target], value=ast.Constant()) if _is_variable(target):
                pass
            case _:
                return False
    return False


def _is_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def _is_variable(target: ast.expr) -> bool:
    """Return True for ``os.environ[...]`` with a constant in the brackets."""
    match target:
        case ast.Subscript(
            value=ast.Attribute(value=ast.Name(id="os"), attr="environ"), slice=ast.Constant()
        ):
            return True
    return False
