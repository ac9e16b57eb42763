"""A fork begins like a Python of its own, as far as a script can tell."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ...patience import PATIENCE_S
from .process import Servers

SCRIPT = """
import atexit, os, sys
def loaded():
    return sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "sympy", "gpuslice"})
print(__name__, sys.argv, sys.path[0], os.getcwd(), os.environ.get("WHO"), "site" "customize" in sys.modules)
print(loaded(), [type(finder).__name__ for finder in sys.meta_path][-1])
import torch.utils.data
print(loaded(), "torch._dynamo" in sys.modules, hasattr(torch, "_dynamo"))
torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
print(loaded(), "torch._dynamo" in sys.modules, hasattr(torch, "_dynamo"))
print(torch.__spec__.name, torch.__spec__.origin == torch.__file__, torch.get_num_threads())
atexit.register(print, "at exit")
raise KeyboardInterrupt
"""


@pytest.mark.slow
def test_it_begins_and_ends_like_any_python(tmp_path: Path, servers: Servers) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command, told = [sys.executable, "script.py", "a word"], []
    for start in (subprocess.Popen, servers.start):
        with start(
            command,
            cwd=tmp_path,
            env={"WHO": "somebody", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            told.append((process.communicate(timeout=PATIENCE_S)[0], process.returncode))
    assert told[1] == told[0]
    assert told[0][1] == -signal.SIGINT


DRAWING = """
import random, numpy, torch
print(hash("text"), random.random(), numpy.random.rand(), torch.initial_seed())
"""


def test_each_fork_has_seeds_of_its_own(tmp_path: Path, servers: Servers) -> None:
    (tmp_path / "script.py").write_text(DRAWING)
    said: list[list[str]] = []
    for _ in range(3):
        command = [sys.executable, "script.py"]
        with servers.start(command, cwd=tmp_path, env={}, stdout=subprocess.PIPE, text=True) as process:
            said.append(process.communicate(timeout=PATIENCE_S)[0].split())
    hashes, *drawn = zip(*said, strict=True)
    assert hashes[0] != hashes[1]
    assert [len(set(numbers)) for numbers in drawn] == [3, 3, 3]
