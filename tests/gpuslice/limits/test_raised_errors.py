"""Errors are seen before the script catches them, wherever they are raised."""

from __future__ import annotations

import subprocess
import sys

from ...patience import PATIENCE_S

#: In a process of its own, because classes of the whole interpreter are changed.
SCRIPT = """
import torch
from gpuslice.limits.raised_errors import watch

def raised(error):
    if "once" not in str(error):
        error.args = (f"{error}, once",)
    try:
        raise RuntimeError("of the callback's own, once")
    except RuntimeError:
        pass

def by_c():
    torch.ones(2) @ torch.ones(3)

def by_python():
    raise RuntimeError("python")

def no_memory():
    bytearray(1 << 62)

def other():
    raise ValueError("other")

watch((RuntimeError, MemoryError), raised)
for act in (by_c, by_python, no_memory, other):
    try:
        act()
    except (RuntimeError, MemoryError, ValueError) as error:
        print(act.__name__, str(error).count(", once"))
"""


def test_the_callback_sees_each_error_and_may_change_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n") == ["by_c 1", "by_python 1", "no_memory 1", "other 0", ""]
