"""What a script's errors look like: as without gpuslice, wherever they pass through it."""

from __future__ import annotations

import traceback
from types import ModuleType

import pytest

from gpuslice.errors import UsageError, hide_all_own_frames, hide_own_frames

from .conftest import Workshop

#: Errors in loaders, workers, hooks, steps, modules, graphs, threads, subprocesses and at the script's end.
SCRIPT = """
import subprocess, sys, threading, traceback
import torch, gpuslice
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __init__(self, bad=10): self.bad = bad
    def __len__(self): return 16
    def __getitem__(self, i):
        if i == self.bad: raise ValueError(f"row {i}")
        return torch.ones(4)
class Batches:
    def __iter__(self):
        yield torch.ones(4)
        raise KeyError("own loader")
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
A = sys.argv[1] == "attach"
job = gpuslice.attach(model=model, optimizer=opt) if A else None
batches = job.batches if A else (lambda l: l)
epochs = job.epochs if A else range
def show(f, *a):
    print("===", f.__name__, file=sys.stderr)
    try: f(*a)
    except BaseException: traceback.print_exc()
def loader0():
    for _ in epochs(1):
        for x in batches(DataLoader(Rows(), batch_size=2)): pass
def loader2():
    for x in batches(DataLoader(Rows(), batch_size=2, num_workers=1)): pass
def own():
    for x in batches(Batches()): pass
def chain():
    try: own()
    except KeyError as e: raise RuntimeError("wrapped") from e
def groups():
    errors = []
    for f in (own, loader0):
        try: f()
        except Exception as e: errors.append(e)
    raise ExceptionGroup("several", errors)
def leaves(): sys.exit(3)
def leaves2():
    try: sys.exit("text")
    except SystemExit: raise ValueError("in exit")
def init(): torch.nn.Linear("x", 1)
def step():
    model.weight.grad = None
    class Bad(torch.optim.SGD):
        def step(self): raise ZeroDivisionError("step")
    Bad(model.parameters(), lr=0.1).step()
def module():
    class Bad(torch.nn.Module):
        def forward(self, x): return x @ torch.ones(3)
    Bad()(torch.ones(2))
def backward():
    class F(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x * 2
        @staticmethod
        def backward(ctx, g): raise ArithmeticError("backward")
    F.apply(model.weight).sum().backward()
def interrupt():
    class L:
        def __iter__(self):
            yield 1
            import signal; signal.raise_signal(signal.SIGINT)
    for x in batches(L()): pass
def popen(): subprocess.run(["/nonexistent"])
tried = [loader0, loader2, own, chain, groups, leaves, leaves2, init, step, module, backward, interrupt]
for f in [*tried, popen]: show(f)
def work(): torch.ones(2) @ torch.ones(3)
def work_of_its_own(): raise ValueError("mine")
for w in (work, work_of_its_own):
    t = threading.Thread(target=w); t.start(); t.join()
"""


@pytest.mark.slow
def test_no_traceback_of_the_scripts_shows_a_frame_of_ours(warm_workshop: Workshop) -> None:
    warm_workshop.write("errors.py", SCRIPT)
    plain = warm_workshop.python("errors.py", "plain")
    ours = warm_workshop.gpuslice_run("--suspend-every", "3", "errors.py", "attach")
    assert plain.returncode == ours.returncode == 0, ours.stderr
    assert plain.stderr.count("Traceback (most recent call last)") > 15
    shown = [line for line in ours.stderr.splitlines() if not line.startswith("gpuslice: ")]
    assert shown == plain.stderr.splitlines()


#: Functions of a module of gpuslice and of a script's, which call each other.
OWN = """
def call(function): function()

def passing(function, **options):
    try:
        call(function)
    except BaseException as error:
        hide_own_frames(error, **options)
        raise

def bug(): raise RuntimeError("a bug")
"""
THEIRS = """
def fail(): raise ValueError("theirs")

def interrupted(): raise KeyboardInterrupt

def through(passing, function): passing(function)
"""


def module(name: str, source: str) -> ModuleType:
    made = ModuleType(name)
    made.__dict__["hide_own_frames"] = hide_own_frames
    exec(compile(source, f"<{name}>", "exec"), made.__dict__)  # noqa: S102
    return made


own, theirs = module("gpuslice.made_up", OWN), module("script", THEIRS)


def functions(error: BaseException) -> list[str]:
    """Where the error was raised, from the outermost function on, without the test's own."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)][1:]


def test_an_error_passes_without_a_frame() -> None:
    with pytest.raises(ValueError, match="theirs") as caught:
        theirs.through(own.passing, theirs.fail)
    assert functions(caught.value) == ["through", "fail"]


def test_a_bug_keeps_its_frames_where_that_is_wanted() -> None:
    with pytest.raises(RuntimeError) as caught:
        theirs.through(lambda function: own.passing(function, keep_bugs=True), own.bug)
    assert functions(caught.value)[-3:] == ["passing", "call", "bug"]


def test_errors_of_gpuslice_keep_theirs() -> None:
    def refuse() -> None:
        raise UsageError("refused")

    with pytest.raises(UsageError) as caught:
        own.passing(refuse)
    assert functions(caught.value) == ["passing", "call", "refuse"]


def test_all_that_python_prints_of_an_error_is_without_frames_of_ours() -> None:
    def raised(function: object) -> BaseException:
        try:
            theirs.through(own.call, function)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            return error
        raise AssertionError

    cause, member, bug = (raised(one) for one in (theirs.fail, theirs.fail, own.bug))
    error = raised(theirs.fail)
    error.__cause__, error.__context__ = cause, ExceptionGroup("several", [member, bug])  # type: ignore[list-item]
    cause.__context__ = error  # a ring, as a library has made one
    hide_all_own_frames(error)
    for each in (error, cause, member):
        assert functions(each) == ["through", "fail"]
    assert functions(bug) == ["through", "call", "bug"]
    interrupt = raised(theirs.interrupted)
    hide_all_own_frames(interrupt)
    assert functions(interrupt) == ["through", "interrupted"]
