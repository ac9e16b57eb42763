"""A callback at the end of each backward pass: of ``backward()``, ``autograd.grad`` and all their callers.

Each of them runs the engine in one function of torch's. That function gets a last step of ours. A wrapper
around the function would show in the traceback of an exception that a backward pass raises.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from types import CodeType

from torch._C._dynamo import eval_frame
from torch.autograd import graph

_STEP = "_gpuslice_backward_ended"


class AfterBackward:
    """A hook that calls ``ended`` after every completed backward pass, in the thread that began the pass.

    Passes that a backward pass begins itself (checkpointing) count as well. A pass that fails does not.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        def step() -> None:
            # If the pass has failed, the traceback begins in the frame that called this function. An
            # exception that a caller was handling before has another traceback.
            error = sys.exc_info()[1]
            trace = None if error is None else error.__traceback__
            if trace is None or trace.tb_frame is not sys._getframe(1):
                ended()

        # Between two graphs of a compiled function, dynamo compiles every function that is called, also
        # ``step`` and what it calls. Then nothing is counted. torch 2.6 has no way to skip all of these.
        if hasattr(eval_frame, "set_code_exec_strategy"):
            skip = eval_frame._FrameAction.SKIP
            eval_frame.set_code_exec_strategy(step.__code__, eval_frame._FrameExecStrategy(skip, skip))
        self._function = graph._engine_run_backward
        self._original: CodeType = self._function.__code__
        setattr(graph, _STEP, step)
        self._function.__code__ = _with_last_step(self._function)

    def remove(self) -> None:
        """Restore the code of torch's own function."""
        self._function.__code__ = self._original


def _with_last_step(function: Callable[..., object]) -> CodeType:
    """Return the function's code with a call of ``_STEP`` added at its end. Line numbers stay the same."""
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    arguments = definition.args
    for argument in (*arguments.args, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    definition.returns = None
    call = ast.Expr(ast.Call(ast.Name(_STEP, ast.Load()), [], []))
    ast.copy_location(call, definition.body[-1])
    body = ast.Try(body=definition.body, handlers=[], orelse=[], finalbody=[call])
    definition.body = [ast.copy_location(body, definition.body[0])]
    ast.increment_lineno(tree, first - 1)
    found: dict[str, Callable[..., object]] = {}
    exec(compile(ast.fix_missing_locations(tree), inspect.getfile(function), "exec"), found)  # noqa: S102
    return found[definition.name].__code__
