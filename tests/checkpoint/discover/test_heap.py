"""What a sweep has seen once it need not look for again; and it never misses anything."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import gc, torch
from gpuslice.checkpoint.discover.storages import heap
from gpuslice.checkpoint.discover.storages import sweep
from gpuslice.kernels.host.device import CpuDevice
from gpuslice.types import DeviceName

device = CpuDevice(DeviceName("cpu", None))
everything = len(gc.get_objects())
heap.hide_imports()
assert len(gc.get_objects()) < everything / 20

def found(nbytes):
    return [one.nbytes for one in sweep(device)].count(nbytes)

first = torch.ones(1001)
assert found(4004) == 1
assert gc.get_freeze_count() > everything / 2, "imports stay hidden"

second = torch.ones(1002)
gc.freeze()
assert found(4004) == found(4008) == 1

third = torch.ones(1003)
gc.freeze()
assert found(4004) == found(4008) == found(4012) == 1

gc.freeze()
gc.unfreeze()
assert found(4004) == found(4008) == found(4012) == 1
"""
SET_ASIDE = """
import gc, sys, threading, weakref, torch
from gpuslice.checkpoint.discover.storages import heap
from gpuslice.checkpoint.discover.storages import sweep
from gpuslice.kernels.host.device import CpuDevice
from gpuslice.types import DeviceName

device = CpuDevice(DeviceName("cpu", None))
heap.hide_imports()

class Node:
    def __init__(self, size):
        self.tensor, self.itself = torch.ones(size), self

class Special(torch.Tensor):
    pass

def sizes():
    return sorted(one.nbytes // 4 for one in sweep(device) if 4004 <= one.nbytes < 5000)

old = torch.ones(1001)
cycle, ghost = Node(1002), weakref.ref(Node(1003))
gone = torch.ones(1004)
assert sizes() == [1001, 1002, 1004], "young garbage is collected, not saved"
assert ghost() is None
few = len(gc.get_objects())
assert few < 2000, few

# What is remembered of many tensors is set aside, too, and forgotten with them.
many = [torch.ones(1100) for _ in range(3000)]
for _ in range(3):
    assert sizes().count(1100) == 3000
assert len(gc.get_objects()) < few
del many
assert sizes() == [1001, 1002, 1004]
assert len(heap._seen[torch.Tensor].references) < 1000

# What is new is found beside what was set aside; what is gone is gone.
del gone
new = torch.ones(1005)
new.grad = torch.ones(1005)
late = torch.ones(1006).as_subclass(Special)
view = old[1:]
assert sizes() == [1001, 1002, 1005, 1005, 1006]

# Only C++ holds it for a while: its Python object is kept, and found.
box = torch.nn.Parameter(torch.ones(1007))
assert 1007 in sizes()
leaf = (box * 2).sum()
del box
assert 1007 in sizes()
del leaf
gc.collect()
assert 1007 not in sizes()

# Garbage among what was set aside is collected at the next full collection, as ever.
assert sizes() == [1001, 1002, 1005, 1005, 1006]
ghost = weakref.ref(cycle)
del cycle
assert ghost() is not None
gc.collect()
assert ghost() is None
assert sizes() == [1001, 1005, 1005, 1006]

# A class of tensors that did not exist when the others were set aside.
class Newer(torch.Tensor):
    pass
newer = torch.ones(1008).as_subclass(Newer)
old.__class__ = Newer
assert sizes() == [1001, 1005, 1005, 1006, 1008]

# Without a collector nothing is set aside.
gc.collect()
gc.disable()
sizes()
assert len(gc.get_objects()) > few
gc.enable()

# Other threads make tensors all the time; none is missed.
sys.setswitchinterval(1e-6)
made = []
def make():
    for _ in range(2000):
        made.append(torch.ones(1100))
thread = threading.Thread(target=make)
thread.start()
turn = 0
while thread.is_alive():
    before = len(made)
    if turn % 3 == 0:
        gc.collect()
    assert sizes().count(1100) >= before
    turn += 1
thread.join()
assert sizes().count(1100) == len(made) == 2000
"""


@pytest.mark.parametrize("script", [SCRIPT, pytest.param(SET_ASIDE, marks=pytest.mark.slow)])
def test_what_is_made_later_is_found_whoever_freezes(script: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False
    )
    assert child.returncode == 0, child.stderr


FROZEN = """
import gc, torch
from gpuslice.checkpoint.discover.storages import heap
from gpuslice.checkpoint.discover.storages import sweep
from gpuslice.kernels.host.device import CpuDevice
from gpuslice.types import DeviceName

device = CpuDevice(DeviceName("cpu", None))
heap.hide_imports()
take_all = heap._take_all

def count():
    return [one.nbytes for one in sweep(device)].count(4800)

def then(what):
    def take():
        taken = take_all()
        made.append(torch.ones(1200))
        what()
        return taken
    return take

def interrupt():
    raise KeyboardInterrupt

# While somebody looks, another thread freezes what it has just made; or the look is interrupted.
made = []
for what in (gc.freeze, interrupt, gc.freeze, gc.collect, interrupt):
    heap._take_all = then(what)
    try:
        count()
    except KeyboardInterrupt:
        pass
    heap._take_all = take_all
    for _ in range(2):
        assert count() == len(made)
"""


@pytest.mark.slow
def test_a_look_that_is_disturbed_or_interrupted_hides_nothing_from_the_next() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FROZEN], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


LISTENING = """
import gc, torch
from gpuslice.checkpoint.discover.storages import heap
from gpuslice.checkpoint.discover.storages import sweep
from gpuslice.kernels.host.device import CpuDevice
from gpuslice.types import DeviceName

def listens():
    return heap._before_collection in gc.callbacks

device = CpuDevice(DeviceName("cpu", None))
assert not listens()
for _ in range(2):
    sweep(device)
    assert listens()
    gc.collect(1)
    assert listens()
    gc.collect()
    assert not listens()
    sweep(device)
calls = []
later = lambda phase, info: calls.append(phase)
gc.callbacks.append(later)
gc.collect()
assert calls == ["start", "stop"], "a callback behind ours misses nothing"
gc.callbacks.remove(later)
gc.collect()
assert not listens()
"""


@pytest.mark.slow
def test_collections_are_watched_only_while_something_is_set_aside() -> None:
    command = [sys.executable, "-c", LISTENING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
