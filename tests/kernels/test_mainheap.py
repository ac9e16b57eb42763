"""The heap in which a script made its state, after a switch: no holes, and a free end for gradients."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: In processes of their own: where memory comes from depends on all that was allocated before.
STATE = """
import gc
import torch
from gpuslice.kernels import apart, mainheap, malloc
from gpuslice.kernels.cpu import CpuDevice
from gpuslice.kernels.host import resident_anonymous_bytes
from gpuslice.types import DeviceName
if not malloc.may_set() or not malloc.main_heap_start():
    raise SystemExit("nothing to see")
malloc.tell(malloc.MMAP_THRESHOLD, 32 << 20)  # as after the first large tensor that was freed
device = CpuDevice(DeviceName("cpu", None))
tensors, between = [], []
for number in range(200):
    tensors.append(torch.full((75_000 + 1000 * (number % 2),), float(number)))
    between.append(torch.full((300,), float(number)))
storages = [tensor.untyped_storage() for tensor in tensors]
sizes = [(storage, storage.nbytes()) for storage in storages]
start = malloc.main_heap_start()
inside = lambda tensor: start <= tensor.data_ptr() < malloc.main_heap_end()
print(sum(map(inside, tensors)) > 150)
first, last = tensors[0].data_ptr(), tensors[-1].data_ptr()
def switch():
    device.free(storages)
    device.release_caches()
    parked = resident_anonymous_bytes()
    device.reserve(sizes)
    return parked
"""

GRADIENTS = (
    STATE
    + """
switch()
print(sum(map(inside, tensors)))
gradients = [torch.ones_like(tensor) for tensor in tensors]
print(sum(first <= one.data_ptr() <= last for one in gradients), sum(map(inside, gradients)))
print([float(one[7]) for one in between] == [float(number) for number in range(200)])
"""
)

ENDURANCE = (
    STATE
    + """
def cycle():
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    for tensor in tensors:
        tensor.grad = None
    return switch()
parked = [cycle() for _ in range(5)]
end = malloc.main_heap_end()
parked += [cycle() for _ in range(40)]
print(abs(malloc.main_heap_end() - end) < 160 << 20, (max(parked[5:]) - max(parked[1:5])) >> 20)
"""
)

ONCE = (
    STATE
    + """
plugged, plug = [], mainheap._plug
mainheap._plug = lambda usual: (plugged.append(len(usual)), plug(usual))
for _ in range(3):
    new = [torch.ones(80_000) for _ in range(50)]
    storages += [tensor.untyped_storage() for tensor in new]
    sizes += [(tensor.untyped_storage(), tensor.nbytes) for tensor in new]
    switch()
print(len(plugged))
"""
)

HUGE = (
    STATE
    + """
from pathlib import Path
if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
    raise SystemExit("nothing to see")
switch()
gradients = [torch.ones_like(tensor) for tensor in tensors]
places = sorted(one.data_ptr() for one in gradients)
middle = places[len(places) // 2]
for line in Path("/proc/self/smaps").read_text().splitlines():
    if "-" in line.split()[0]:
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
    elif begin <= middle < end and line.startswith("VmFlags:"):
        print("hg" in line.split())
"""
)


def _run(script: str) -> list[str]:
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    if "nothing to see" in child.stderr:
        pytest.skip("malloc is not glibc's or set up by the environment, or there are no huge pages")
    assert child.returncode == 0, child.stderr
    return child.stdout.splitlines()


def test_gradients_go_to_the_end_and_not_into_the_holes_that_the_state_has_left() -> None:
    assert _run(GRADIENTS) == ["True", "0", "0 200", "True"]


@pytest.mark.slow
def test_holes_are_plugged_once_so_that_addresses_do_not_run_out() -> None:
    assert _run(ONCE) == ["True", "1"]


@pytest.mark.slow
def test_the_end_comes_in_huge_pages() -> None:
    assert _run(HUGE) == ["True", "True"]


@pytest.mark.slow
def test_the_heap_does_not_grow_from_switch_to_switch() -> None:
    made, level = _run(ENDURANCE)
    assert made == "True"
    within, more_mib = level.split()
    assert within == "True"
    assert int(more_mib) <= 2


@pytest.mark.slow
def test_where_malloc_is_set_up_by_the_user_it_is_asked_nothing() -> None:
    script = """
from gpuslice.kernels import apart, malloc
for name in ("take", "tell", "give_back"):
    setattr(malloc, name, None)
apart.take_apart(lambda large: None, [("a", 64 << 20)])
print("untouched")
"""
    child = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env={"MALLOC_ARENA_MAX": "2", "PATH": ""},
    )
    assert child.stdout == "untouched\n", child.stderr
