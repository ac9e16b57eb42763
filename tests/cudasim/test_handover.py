"""One GPU goes from process to process: swapped, and taken over by one that stands by."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from ..gpuslice.conftest import Workshop
from ..patience import PATIENCE_S
from .test_scripts import attached, undisturbed

Player = subprocess.Popen[str]
#: Carries out the lines that it reads, and says when it has; 320 MiB of its own are on the GPU.
PLAYER = """
import hashlib, sys, torch
from pathlib import Path
from gpuslice.checkpoint.switch.swap_protocol import Terms
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.switch.swap_endpoints import SwapListener, Successor
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import GpusliceError
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName

name = sys.argv[1]
disk = RamDisk(Path("ramdisk"), 2 << 30)
store = disk.open_store(name)
tensors = [torch.full((40 << 20,), 7 * k + ord(name), dtype=torch.uint8, device="cuda:0") for k in range(8)]
switch = Switch(open_device(DeviceName("cuda", 0)), store)
terms = Terms(predecessor="a", successor="b", epoch=7, device="cuda:0")

def whole():
    return all(bool((t == (7 * k + ord(name)) % 256).all()) for k, t in enumerate(tensors))

def attempt(lines):
    global failed
    try:
        for line in lines:
            exec(line, globals())
    except (RuntimeError, GpusliceError):
        failed = True

print(store.directory, flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


def tell(player: Player, line: str) -> None:
    assert player.stdin is not None
    player.stdin.write(f"{line}\n")
    player.stdin.flush()


def hear(player: Player) -> str:
    assert player.stdout is not None
    return player.stdout.readline().strip()


def ask(player: Player, line: str) -> None:
    tell(player, line)
    assert hear(player) == "done"


@contextmanager
def playing(workshop: Workshop, name: str) -> Iterator[tuple[Player, str]]:
    command = [sys.executable, str(workshop.write("player.py", PLAYER)), name]
    with workshop.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as player:
        try:
            yield player, hear(player)
        finally:
            player.kill()


def test_two_processes_swap_on_a_gpu_that_holds_one(warm_workshop: Workshop) -> None:
    """Two contexts of 64 MiB and one state fit; a second state does not."""
    warm_workshop.environ["CUDASIM_MEMORY_MIB"] = "640"
    with ExitStack() as stack:
        b, door_of_b = stack.enter_context(playing(warm_workshop, "b"))
        ask(b, "switch.suspend(boundary=1)")
        a, _ = stack.enter_context(playing(warm_workshop, "a"))
        ask(b, "listener = SwapListener(store.directory, terms)")
        tell(b, f"record = switch.resume(swap=listener.await_predecessor({PATIENCE_S}))")
        tell(a, f"record = switch.suspend(boundary=1, successor=Successor(Path({door_of_b!r}), terms))")
        assert (hear(a), hear(b)) == ("done", "done")
        ask(a, "assert record.bytes_given > 0, record")
        ask(b, "assert record.bytes_taken > 0 and whole(), record")
        ask(b, "switch.suspend(boundary=2)")
        ask(a, "switch.resume()")
        ask(a, "assert whole()")


@pytest.mark.simulated
@pytest.mark.parametrize("fault", ["cudaMemcpyAsync", "cudaMalloc"])
def test_a_successor_that_fails_stays_parked_and_comes_back(warm_workshop: Workshop, fault: str) -> None:
    warm_workshop.environ["CUDASIM_MEMORY_MIB"] = "640"
    with ExitStack() as stack:
        b, door_of_b = stack.enter_context(playing(warm_workshop, "b"))
        ask(b, "switch.suspend(boundary=1)")
        a, _ = stack.enter_context(playing(warm_workshop, "a"))
        ask(b, "import cudasim; listener = SwapListener(store.directory, terms)")
        ask(b, "successor = None; failed = False")
        lines = [
            f"successor = listener.await_predecessor({PATIENCE_S})",
            f"[cudasim.fail({fault!r}, 2, nth=n) for n in range(2, 9)]",
            "switch.resume(swap=successor)",
        ]
        tell(b, f"attempt({lines!r})")
        tell(a, f"record = switch.suspend(boundary=1, successor=Successor(Path({door_of_b!r}), terms))")
        assert (hear(a), hear(b)) == ("done", "done")
        ask(b, "cudasim.forget_faults(); failed and switch.resume()")
        ask(b, "assert whole()")
        ask(b, "switch.suspend(boundary=2)")
        ask(a, "switch.resume()")
        ask(a, "assert whole()")


def test_a_process_that_stands_by_goes_on_after_a_kill(warm_workshop: Workshop) -> None:
    source = attached("os.kill(os.getpid(), 9)").replace(
        "for (batch", "print('begun', flush=True)\nfor (batch"
    )
    script = str(warm_workshop.write("train.py", source))
    expected = undisturbed(warm_workshop, script, "cuda:0")
    warm_workshop.write("once", "")
    words = ("--device", "cuda:0", "--job", "mnist", "--checkpoint-every", "4")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = warm_workshop.command(*words, script, "cuda:0")
    with ExitStack() as stack:
        first = stack.enter_context(warm_workshop.start(command, **pipes))
        assert hear(first) == "begun"
        command = warm_workshop.command(*words, "--standby", script, "cuda:0")
        second = stack.enter_context(warm_workshop.start(command, **pipes))
        first.communicate(timeout=PATIENCE_S)
        out, err = second.communicate(timeout=PATIENCE_S)
    assert first.returncode == -9
    assert (second.returncode, out) == (0, expected), err
