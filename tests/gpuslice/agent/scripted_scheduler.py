"""A real script in a process of its own, and a scheduler that says to it what the test wants."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import zmq

from gpuslice.wire import (
    PROTOCOL_VERSION,
    Bye,
    FromAgent,
    Hello,
    Overshot,
    Profiled,
    Progress,
    Refused,
    Resume,
    Resumed,
    Suspend,
    Suspended,
    ToAgent,
    Welcome,
    decode_from_agent,
    encode,
)

from ...patience import PATIENCE_MS, PATIENCE_S
from ..conftest import Workshop

_M = TypeVar("_M", bound=FromAgent)

TRAIN = """
import hashlib, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(64, 20), torch.randint(0, 3, (64,)))
print("started", flush=True)
epochs = 0
while epochs < int(sys.argv[1]) and not os.path.exists("enough"):
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    epochs += 1
digest = hashlib.sha256()
for value in model.state_dict().values():
    digest.update(value.numpy().tobytes())
print(epochs, digest.hexdigest())
"""
#: More epochs than any test waits for. A file called "enough" ends them.
ENDLESS = "1000000"


class ScriptedScheduler:
    """A scheduler of the test's own: says and hears single messages."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = f"ipc://{directory}/scheduler"
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(self.endpoint)
        #: The identity of the newest process of each rank that was heard.
        self._identities: dict[str, bytes] = {}

    def say(self, message: ToAgent, rank: str = "job:0") -> None:
        self._router.send_multipart([self._identities[rank], encode(message)])

    def say_nonsense(self, rank: str = "job:0") -> None:
        self._router.send_multipart([self._identities[rank], b"\xc1nonsense"])

    def hear(self, kind: type[_M], where: Callable[[_M], bool] = lambda message: True) -> _M:
        """The next message of this kind, which comes before any other but ``Progress``."""
        ends_s = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < ends_s, f"nothing but Progress, and no {kind.__name__}"
            identity, frame = self._router.recv_multipart()
            self.rank, _, _pid = identity.decode().rpartition(":")
            self._identities[self.rank] = identity
            message = decode_from_agent(frame)
            if isinstance(message, kind):
                if where(message):
                    return message
            else:
                assert isinstance(message, Progress | Profiled), message

    def welcome(self) -> Hello:
        hello = self.hear(Hello)
        self.say(Welcome(version=PROTOCOL_VERSION))
        return hello

    def grant(self, epoch: int, device: str = "cpu") -> Resumed:
        self.say(Resume(epoch=epoch, device=device))
        return self.hear(Resumed)

    def park(self, epoch: int) -> Suspended:
        """Stop the job a little ahead of where it is, as often as it takes."""
        return self.stop(epoch, self.hear(Progress, lambda progress: progress.boundary > 0).boundary + 1)

    def stop(self, epoch: int, stop_at: int, *, said: bool = False) -> Suspended:
        """Stop the job at ``stop_at``, or further on if it is past that."""
        ahead = 50
        while True:
            if not said:
                self.say(Suspend(epoch=epoch, stop_at=stop_at))
            said, answer = False, self.hear_either(Suspended)
            if isinstance(answer, Suspended):
                assert answer.boundary == stop_at
                return answer
            stop_at = answer.boundary + ahead
            ahead *= 2  # who is slow here has to look further ahead

    def stop_in_vain(self, epoch: int) -> Refused:
        """Tell the job to stop, which it refuses, at a boundary that it has not passed."""
        at, ahead = self.hear(Progress).boundary, 50
        while True:
            self.say(Suspend(epoch=epoch, stop_at=at + ahead))
            answer = self.hear_either(Refused)
            if isinstance(answer, Refused):
                return answer
            at, ahead = answer.boundary, 2 * ahead

    def hear_either(self, kind: type[_M]) -> _M | Overshot:
        """The next message of this kind, unless the job is past the boundary that it was told of."""
        while True:
            message = decode_from_agent(self._router.recv_multipart()[1])
            if isinstance(message, kind | Overshot):
                return message
            assert isinstance(message, Progress | Profiled), message

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[ScriptedScheduler]:
    scheduler = ScriptedScheduler(tmp_path)
    yield scheduler
    scheduler.close()


@contextmanager
def job(
    workshop: Workshop, scheduler: ScriptedScheduler, epochs: str, *flags: str, script: str = TRAIN
) -> Iterator[subprocess.Popen[str]]:
    workshop.write("train.py", script)
    workshop.environ |= {"GPUSLICE_SOCKET": scheduler.endpoint}
    command = workshop.command("--job", "job", *flags, "train.py", epochs)
    process = workshop.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def ends_as_undisturbed(
    workshop: Workshop, scheduler: ScriptedScheduler, process: subprocess.Popen[str]
) -> str:
    """End a job that runs: as many epochs without a scheduler make the same model. What it said of itself."""
    enough = workshop.write("enough", "")
    boundaries = scheduler.hear(Bye).boundary
    code, out, err = end(process)
    epochs = out.split()[1]
    assert boundaries == int(epochs) * 9
    enough.unlink()
    assert (code, out) == (0, workshop.python("train.py", epochs).stdout)
    return err
