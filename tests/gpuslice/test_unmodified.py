"""Scripts that lean on what plain python does: under a suspend at every boundary they do it all the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from .conftest import Workshop

#: What every script below trains; beside it, as a user's own module would be.
COMMON = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def train(steps=4, hook=None, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.randn(4 * steps, 8))
    for number, (x,) in enumerate(DataLoader(data, batch_size=4, **options)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if hook:
            hook(number)
    return float(model.weight.sum())
"""

#: A module with relative imports, run under interpreter flags; it ends by an exception with a history.
MODULE = """
import sys, warnings
from . import sibling
from .. import NAME
from common import train

print(__name__, __package__, __spec__.name, NAME, sibling.NUMBER, sys.argv, sys.path[0], sorted(globals()))
print(sys.flags, sys.warnoptions, [type(finder).__name__ for finder in sys.meta_path][-3:])
warnings.warn("careful")
print(train())

def hook(number):
    try:
        {}["key"]
    except KeyError as error:
        try:
            raise ValueError("second") from error
        except ValueError:
            raise RuntimeError("third")

train(hook=hook)
"""

#: A directory with a __main__.py in another encoding, which executes itself once and ends by Ctrl-C.
MAIN = """# -*- coding: latin-1 -*-
import atexit, os, signal, sys
atexit.register(print, "registered before torch")
sys.path.append(os.getcwd())
import helper
from common import train
print(__name__, __package__, os.path.basename(__file__), ascii("\xe9"), helper.NUMBER, sys.argv)
print(train(), flush=True)
if len(sys.argv) == 1:
    os.execv(sys.executable, [*sys.orig_argv, "again"])
atexit.register(lambda: print("at the end", train(2)))
train(hook=lambda number: number == 2 and os.kill(os.getpid(), signal.SIGINT))
"""

#: Threads that end badly, a fork that ends in its own way, workers, swapped tensors, replaced streams, hooks.
PROCESS = """
import io, os, sys, threading
print(sys.excepthook is sys.__excepthook__)
out, sys.stdout = sys.stdout, io.StringIO()
from common import train
print(train())
text, sys.stdout = sys.stdout.getvalue(), out
print("captured", text)

def bad():
    raise ValueError("in a thread")

for target in (bad, sys.exit):
    thread = threading.Thread(target=target, name="worker")
    thread.start()
    thread.join()
sys.stdout.flush()
pid = os.fork()
if pid == 0:
    print("child", train(2), flush=True)
    sys.exit(4)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), train(num_workers=1))
print(sys.stdin.read())

def deep(number):
    return train(2) if number == 0 else deep(number - 1)

print(deep(500))
import torch
pair = torch.zeros(3), torch.ones(3)
train(3, lambda number: torch.utils.swap_tensors(*pair))
print(pair)
sys.excepthook = lambda kind, error, trace: print("own hook", kind.__name__, error)
sys.setrecursionlimit(200)
deep(10**6)
"""

CASES = {
    "module": (
        ["-u", "-bb", "-W", "always::UserWarning", "-m", "package.sub.module", "a", "--", "-x"],
        MODULE,
        1,
    ),
    "directory": (["application"], MAIN, -2),
    "process": (["process.py"], PROCESS, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_nothing_tells_it_from_plain_python(
    request: pytest.FixtureRequest, others_lines: Callable[[str], str], name: str
) -> None:
    # All but the module, which shows the finders, do the same where Pythons load no compiler.
    workshop: Workshop = request.getfixturevalue("workshop" if name == "module" else "quick_workshop")
    words, source, code = CASES[name]
    workshop.write("common.py", COMMON)
    workshop.write("package/__init__.py", "NAME = 'package'\n")
    workshop.write("package/sub/__init__.py", "")
    workshop.write("package/sub/sibling.py", "NUMBER = 1\n")
    workshop.write("application/helper.py", "NUMBER = 2\n")
    for path in ("package/sub/module.py", "application/__main__.py", "process.py"):
        workshop.write(path, source).write_bytes(source.encode("latin-1"))
    plain = [sys.executable, *words]
    flags = ["--suspend-every", "1", "--report", "report.json"]
    ours = (
        workshop.command(*flags, "--", *plain)
        if words[0].startswith("-")
        else workshop.command(*flags, *words)
    )

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        return workshop.execute(command, stdin="one line\n")

    with ThreadPoolExecutor() as pool:
        expected, done = pool.map(run, [plain, ours])
    assert expected.returncode == code, expected.stderr
    assert (done.stdout, others_lines(done.stderr)) == (expected.stdout, expected.stderr)
    assert done.returncode == code
    summary = done.stderr.splitlines()[-1]
    assert summary.startswith("gpuslice: ")
    assert not summary.startswith("gpuslice: no switch")
