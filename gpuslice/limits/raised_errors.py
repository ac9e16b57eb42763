"""Sees errors of built-in classes when they are raised, also those that C++ raises and the script catches.

Python has a documented call for this from 3.12 on (``sys.monitoring``). In Python 3.11 the classes' own
``__init__``, which a built-in class has in C, is where every such error comes by.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
from collections.abc import Callable
from typing import Any, cast

#: ``Py_tp_init`` of Python's stable ABI (``typeslots.h``).
_INIT = 60
_Init = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
#: Numbers of ``sys.monitoring`` that it reserves for no kind of tool.
_TOOLS = (3, 4)


def watch(kinds: tuple[type[BaseException], ...], raised: Callable[[BaseException], None]) -> None:
    """Call ``raised`` with every error of ``kinds`` before the script sees it, from now on.

    Parameters
    ----------
    kinds
        Built-in classes; some of the classes derived from them count, too.
    raised
        May change the error's ``args``, raises nothing, and may be called again with the same error.
    """
    if sys.version_info >= (3, 12):
        _monitor(kinds, raised)
    else:
        for kind in kinds:
            _replace_init(kind, raised)


def _monitor(kinds: tuple[type[BaseException], ...], raised: Callable[[BaseException], None]) -> None:
    """Costs nothing but where something is raised: no code is instrumented for these events."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]  # none in Python 3.11
    free = [tool for tool in _TOOLS if monitoring.get_tool(tool) is None]
    if not free:
        return  # the script's tools have taken all; what ends it is still explained

    def on_raise(code: object, offset: int, error: BaseException) -> None:
        if isinstance(error, kinds):
            raised(error)

    monitoring.use_tool_id(free[0], "gpuslice")
    monitoring.register_callback(free[0], monitoring.events.RAISE, on_raise)
    monitoring.set_events(free[0], monitoring.events.RAISE)


def _replace_init(kind: type[BaseException], raised: Callable[[BaseException], None]) -> None:
    """Have the class's ``tp_init`` followed by ``raised``, until the interpreter ends."""
    ask = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_int)(
        ("PyType_GetSlot", ctypes.pythonapi)
    )
    address = ask(kind, _INIT)
    original = _Init(address)
    # The class object itself, word by word: PyType_GetSlot has no counterpart that writes.
    count = cast(int, type.__basicsize__) // ctypes.sizeof(ctypes.c_void_p)
    words = (ctypes.c_void_p * count).from_address(id(kind))
    place = words[:].index(address)

    busy = False

    def begin(error: Any, args: Any, kwargs: Any) -> int:
        nonlocal busy
        status: int = original(error, args, kwargs)
        if status == 0 and not busy:  # looking at an error may raise one
            busy = True
            try:
                raised(ctypes.cast(error, ctypes.py_object).value)
            finally:
                busy = False
        return status

    replaced = _Init(begin)
    # Classes that are derived from now on inherit it, and may be used until the very end.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(replaced))
    words[place] = ctypes.cast(replaced, ctypes.c_void_p)
    atexit.register(words.__setitem__, place, address)
