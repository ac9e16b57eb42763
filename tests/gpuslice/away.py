"""Fails every call of the device once, with every kind of error, and tells what each training script saw.

A script of its own, which forks a process for each case. In each a training loop suspends and resumes as one
of the controllers says, and does what careless scripts do: it passes over errors, and saves its model in a
``finally``. One line of JSON a case: what was failed, how the process ended, what the script saved.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

import gpuslice.runtime.current
from gpuslice.agent.agent import Agent
from gpuslice.agent.drill import Drill
from gpuslice.checkpoint.discover import heap
from gpuslice.config import Settings
from gpuslice.errors import DeviceMemoryError
from gpuslice.kernels import Device
from gpuslice.kernels.host.device import CpuDevice
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.job import Job
from gpuslice.runtime.runtime import Runtime
from gpuslice.types import DeviceName
from gpuslice.wire import FromAgent, Refused, Resume, Suspend, Suspended

#: What a device's calls fail with.
ERRORS: dict[str, Callable[[], BaseException]] = {
    "cuda": lambda: RuntimeError("CUDA error: unspecified launch failure"),
    "memory": lambda: DeviceMemoryError("no memory", "wait"),
    "torch-memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "host-memory": MemoryError,
    "interrupt": KeyboardInterrupt,
    "exit": lambda: SystemExit(0),
}
CPU = CpuDevice(DeviceName("cpu", None))
#: The protocol's methods and attributes that do something.
CALLS = [name for name in vars(Device) if not name.startswith("_") and name not in ("name", "torch_device")]


def is_method(device: Device, name: str) -> bool:
    """Whether the call is one of a method. That of an attribute fails before and after it in the same way."""
    return callable(getattr(type(device), name, None))


class Faulty:
    """A device of which the n-th call fails, before it has done anything or after all is done."""

    def __init__(
        self, device: Device, number: int, error: Callable[[], BaseException], *, late: bool
    ) -> None:
        self._device = device
        self._number = number
        self._error = error
        self._late = late
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            return getattr(self._device, name)
        if is_method(self._device, name):
            return lambda *args, **options: self._call(name, args, options)
        self._count(name)
        return getattr(self._device, name)

    def _call(self, name: str, args: Any, options: Any) -> Any:
        due = len(self.calls) == self._number
        self.calls.append(name)
        if due and not self._late:
            raise self._error()
        result = getattr(self._device, name)(*args, **options)
        if due:
            raise self._error()
        return result

    def _count(self, name: str) -> None:
        due = len(self.calls) == self._number
        self.calls.append(name)
        if due:
            raise self._error()


class Script:
    """A model whose weights are known."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(60, 90)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.step()

    def step(self) -> None:
        self.model(torch.ones(3, 60)).sum().backward()
        self.optimizer.step()

    def digest(self) -> str:
        tensors = [*self.model.state_dict().values()]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        there = [t.detach() for t in tensors if t.untyped_storage().nbytes()]
        found = hashlib.sha256(f"{[(t.untyped_storage().nbytes(), *t.shape) for t in there]}".encode())
        for tensor in there:
            found.update(tensor.numpy().tobytes())
        return found.hexdigest()


class Post:
    """In place of the agent's link: what it says is answered at once by an order."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._instead_of = agent._link  # whose sockets would wait for somebody as they are collected
        self._epoch = 1

    def send(self, message: FromAgent) -> None:
        if isinstance(message, Suspended) or (isinstance(message, Refused) and not message.running):
            self._epoch += 1
            self._agent._orders.resume(Resume(epoch=self._epoch, device="cpu"))


def drill(runtime: Runtime) -> None:
    Drill(runtime, every=1).at_boundary(1)


def agent(runtime: Runtime) -> None:
    obeying = Agent(runtime)
    obeying._link = Post(obeying)  # type: ignore[assignment]
    obeying._began = True
    orders = obeying._orders
    orders.resume(Resume(epoch=1, device="cpu"))
    orders.await_order()
    orders.run_on()
    orders.suspend(Suspend(epoch=1, stop_at=1))
    runtime.boundaries.count = 1
    obeying.at_boundary(1)


def script(runtime: Runtime) -> None:
    job = Job(runtime, {})
    job.suspend()
    with suppress(DeviceMemoryError):
        job.resume()
        return
    job.resume()


CONTROLLERS = {"drill": drill, "agent": agent, "script": script}


def train(controller: str, device: Faulty, directory: Path) -> Script:
    """One boundary of a job whose device is ``device``."""
    settings = Settings(ramdisk_dir=str(directory / "ramdisk"), job="kept", socket="ipc:///nowhere")
    runtime = Runtime(settings, RankIdentity(), BoundaryCounter())
    runtime.suspension.in_use.device = device
    gpuslice.runtime.current._runtime = runtime
    state = Script()
    try:
        CONTROLLERS[controller](runtime)
    finally:
        (directory / "saved").write_text(state.digest(), encoding="ascii")
    return state


def case(controller: str, device: Faulty, directory: Path) -> NoReturn:
    """Be the process of one case; ends with the script's exit code, or with ours."""
    try:
        train(controller, device, directory)
    except BaseException:  # noqa: BLE001 - as a script that ends by an error, whatever it is
        (directory / "error").write_text(traceback.format_exc(), encoding="utf-8")
        os._exit(99)
    (directory / "calls").write_text(json.dumps(device.calls), encoding="ascii")
    os._exit(0)


def run(controller: str, number: int, kind: str, directory: Path, *, late: bool) -> dict[str, Any]:
    """How one case ended."""
    directory.mkdir(parents=True)
    device = Faulty(CPU, number, ERRORS[kind], late=late)
    pid = os.fork()
    if pid == 0:
        case(controller, device, directory)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    texts = {name: _read(directory / name) for name in ("saved", "error", "calls")}
    snapshots = [str(path) for path in (directory / "ramdisk").rglob("*.gsnp")]
    return {"case": [controller, number, kind, late], "code": code, "files": snapshots, **texts}


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def cases(
    directory: Path, controllers: list[str], kinds: list[str], *, in_turn: bool
) -> Iterator[dict[str, Any]]:
    """An undisturbed run of each controller, then all its failures: each call with each kind, or in turn."""
    for controller in controllers:
        place = directory / controller
        whole = run(controller, -1, "cuda", place / "undisturbed", late=False)
        yield whole
        calls = json.loads(whole["calls"])
        # Of those in a row, such as `owns` of every storage, the first stands for all.
        kind_in_turn = itertools.cycle(kinds)
        for number in [n for n, call in enumerate(calls) if n == 0 or calls[n - 1] != call]:
            for late in (False, True) if is_method(CPU, calls[number]) else (False,):
                for kind in [next(kind_in_turn)] if in_turn else kinds:
                    name = f"{number}-{kind}-{late}"
                    yield run(controller, number, kind, place / name, late=late)


if __name__ == "__main__":
    Script()  # makes torch import all that optimizers need, which the forks then have
    heap.hide_imports()
    where, controllers, kinds, order = sys.argv[1:]
    found = cases(Path(where), controllers.split(","), kinds.split(","), in_turn=order == "in turn")
    for outcome in found:
        print(json.dumps(outcome), flush=True)
