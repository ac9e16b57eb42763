"""``gpuslice run --standby``: a process that is ready goes on when the job's own ends, however it ends."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import pytest

from ..patience import PATIENCE_S
from .conftest import Workshop
from .warm.process import Servers

#: Does what the next line of its standard input says at the end of every batch.
TRAIN = """
import hashlib, sys
import torch, gpuslice
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters())
print("built", flush=True)
job = gpuslice.attach(model=model, optimizer=optimizer)
for epoch in job.epochs(2):
    for number in job.batches(range(3)):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        print("batch", epoch, number, flush=True)
        word = sys.stdin.readline().strip()
        if word == "leave":
            job.suspend()
            sys.exit()
        elif word == "save":
            with job.suspended():
                pass
            print("saved", flush=True)
            sys.stdin.readline()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print("digest", digest.hexdigest())
"""
BATCHES = [f"batch {epoch} {number}" for epoch in range(2) for number in range(3)]
Process = subprocess.Popen[str]


def standing_by(workshop: Workshop) -> AbstractContextManager[Process]:
    """One that has said that it waits."""
    return running(workshop, "--standby", waits=True)


@contextmanager
def running(workshop: Workshop, *words: str, waits: bool = False) -> Iterator[Process]:
    command = workshop.command("--job", "j", *words, "train.py")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with workshop.start(command, **pipes) as process:
        try:
            assert hear(process) == "built"
            if waits:
                assert process.stderr is not None
                assert process.stderr.readline() == "gpuslice: standing by for job j\n"
            yield process
        finally:
            process.kill()


def hear(process: Process) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: Process, word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def finish(process: Process) -> list[str]:
    """Let it go through all its batches; the rest of its output."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    # Not by `communicate`, which does not see what came with a line that `hear` has read.
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write("\n" * 10)
    lines, stderr = process.stdout.read().splitlines(), process.stderr.read()
    assert process.wait(PATIENCE_S) == 0, stderr
    return lines


@pytest.fixture
def workshop(warm_workshop: Workshop) -> Workshop:
    return warm_workshop


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, servers: Servers) -> str:
    """The digest of an undisturbed run; of one that stands by for nobody, which simply begins."""
    directory = tmp_path_factory.mktemp("undisturbed")
    alone = Workshop(directory, directory / "ramdisk", servers)
    alone.write("train.py", TRAIN)
    with running(alone, "--standby") as process:
        *batches, digest = finish(process)
    assert batches == BATCHES
    return digest


@pytest.fixture(autouse=True)
def script(workshop: Workshop) -> None:
    workshop.write("train.py", TRAIN)


@pytest.mark.parametrize("way", ["it leaves", "it is killed"])
def test_the_one_that_stands_by_goes_on(workshop: Workshop, expected: str, way: str) -> None:
    with running(workshop) as first, standing_by(workshop) as second:
        assert hear(first) == BATCHES[0]
        if way == "it leaves":
            tell(first, "leave")
        else:
            tell(first, "save")
            assert hear(first) == "saved"
            first.kill()
        assert finish(second) == [*BATCHES[1:], expected]


@pytest.mark.slow
def test_two_stand_by_and_one_of_them_goes_on(workshop: Workshop, expected: str) -> None:
    with running(workshop) as first:
        hear(first)
        with standing_by(workshop) as second, standing_by(workshop) as third:
            for process in (second, third):
                tell(process, "\n" * 10)  # whichever it is that goes on, the other one waits for its end
            tell(first, "leave")
            outputs = [finish(second), finish(third)]
            assert sorted(outputs) == [[], [*BATCHES[1:], expected]]


def test_there_is_nothing_left_to_do_after_a_good_end(workshop: Workshop, expected: str) -> None:
    with running(workshop) as first:
        hear(first)
        with standing_by(workshop) as second:
            assert finish(first)[-1] == expected
            stdout, stderr = second.communicate(timeout=PATIENCE_S)
            assert (second.returncode, stdout) == (0, "")
            assert "gpuslice: job j has ended; nothing is left to do" in stderr
