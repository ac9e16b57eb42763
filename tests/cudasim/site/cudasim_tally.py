"""What the summary of a test session counts: lines from all its processes in the file ``CUDASIM_TALLY``."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TALLY, SWITCH = "CUDASIM_TALLY", "gpuslice.checkpoint.switch.switch"


def tell(*words: object) -> None:
    """Add a line, if anybody counts."""
    if TALLY in os.environ:
        with Path(os.environ[TALLY]).open("a", encoding="utf-8") as file:
            file.write(" ".join(map(str, words)) + "\n")


class SwitchCounter:
    """Stands among the finders of modules, finds none, and has switches counted once there are any."""

    def __init__(self) -> None:
        self._found = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        switch = getattr(sys.modules.get(SWITCH), "Switch", None)
        if switch is not None and not self._found:
            self._found = True
            switch.suspend, switch.resume = _suspend(switch.suspend), _resume(switch.resume)


def _suspend(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def suspend(switch: Any, *arguments: Any, **options: Any) -> Any:
        return _counted("suspend", switch, functools.partial(method, switch, *arguments, **options))

    return suspend


def _resume(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def resume(switch: Any, device: Any = None, **options: Any) -> Any:
        moves = device is not None and device.name != switch.device.name
        what = "move" if moves else "resume"
        return _counted(what, switch, functools.partial(method, switch, device, **options))

    return resume


def _counted(what: str, switch: Any, carry_out: Callable[[], Any]) -> Any:
    route = "tensor" if switch._shim is None else "vmm"
    try:
        result = carry_out()
    except BaseException as error:
        tell("switch", what, route, type(error).__name__)
        raise
    tell("switch", what, route, "done")
    return result
