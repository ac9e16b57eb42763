"""States that move between simulated GPUs, and resumes that CUDA fails: whole again, or the process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.overrides import _pop_mode

from gpuslice.agent.gpu_names import GpuNames
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import SuspendRefusedError
from gpuslice.kernels import open_device
from gpuslice.runtime.threads.thread_gate import ThreadGate
from gpuslice.types import DeviceName

Environ = dict[str, str]
pytestmark = pytest.mark.simulated

TRAIN = """
import hashlib, sys, torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = torch.device("cuda")
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(64, 20), torch.randint(0, 4, (64,)))

def train(x, y):
    x, y = x.to(device), y.to(device)
    output = model(x + 0.1 * torch.randn_like(x)).squeeze(0)
    loss = torch.nn.functional.cross_entropy(output, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return output, loss

def digest():
    parts = [*model.state_dict().values()] + [v for s in optimizer.state.values() for v in s.values()]
    return hashlib.sha256(repr([part.cpu().tolist() for part in parts]).encode()).hexdigest()
"""
MOVES = (
    TRAIN
    + """
import gpuslice
job = gpuslice.attach(model=model, optimizer=optimizer)
for step, (x, y) in enumerate(DataLoader(data, batch_size=8)):
    output, loss = train(x, y)  # which keep the dead graph of the last batch
    if step in (2, 5) and sys.argv[1] == "move":
        job.suspend()
        job.resume("cuda:1" if step == 2 else "cuda:0")
        assert loss.device == next(model.parameters()).device == torch.device("cuda", int(step == 2))
        assert not torch.cuda.memory_allocated(int(step == 5))
print(digest())
"""
)
CARELESS = (
    TRAIN
    + """
import cudasim
from gpuslice.checkpoint.switch.switch import Switch
name, code, nth, sticky = sys.argv[1], *map(int, sys.argv[2:5])
resume, resumed = Switch.resume, []
def failing(self, *arguments, **options):
    if not resumed and name != "nothing":
        cudasim.fail(name, code, nth=nth, sticky=bool(sticky))
    resumed.append(1)
    return resume(self, *arguments, **options)
Switch.resume = failing
torch.save(model.state_dict(), "good.pt")
try:
    for x, y in DataLoader(data, batch_size=8):
        try:
            train(x, y)
        except RuntimeError:
            print("skipped a batch", flush=True)
finally:
    torch.save(model.state_dict(), "good.pt")
print(digest())
"""
)


def run(source: str, directory: Path, environ: Environ, *words: str) -> subprocess.CompletedProcess[str]:
    (directory / "train.py").write_text(source, encoding="utf-8")
    return subprocess.run(
        [sys.executable, *words],
        cwd=directory,
        env={**os.environ, **environ, "GPUSLICE_RAMDISK_DIR": str(directory / "ramdisk")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_ordinary_script_s_state_moves_there_and_back(tmp_path: Path, script_environ: Environ) -> None:
    stayed, moved = (run(MOVES, tmp_path, script_environ, "train.py", word) for word in ("stay", "move"))
    assert (moved.returncode, moved.stdout) == (0, stayed.stdout), moved.stderr
    assert len(stayed.stdout) == 65


@pytest.mark.parametrize("kind", ["stream", "event"])
def test_what_belongs_to_a_gpu_keeps_the_job_there_and_is_named(tmp_path: Path, kind: str) -> None:
    tensor, kept = torch.ones(1000, device="cuda:0"), {}
    if kind == "stream":
        kept["side_work"] = torch.cuda.Stream(0)
    else:
        kept["side_work"] = torch.cuda.Event()
        kept["side_work"].record(torch.cuda.current_stream(0))
    other = open_device(DeviceName("cuda", 1))
    with RamDisk(tmp_path / "ramdisk", 64 << 20).open_store(None) as store:
        switch = Switch(open_device(DeviceName("cuda", 0)), store)
        switch.suspend(boundary=1)
        assert f"the CUDA {kind} side_work" in switch.obstacle_to_moves()
        with pytest.raises(SuspendRefusedError, match="side_work"):
            switch.resume(other)
        kept.clear()
        assert not switch.obstacle_to_moves(), "gpuslice's own streams are no obstacle"
        switch.resume(other)
        assert tensor.device.index == 1
        assert tensor.sum().item() == 1000


def test_the_stream_that_torch_keeps_for_captures_is_made_anew_elsewhere(tmp_path: Path) -> None:
    def doubled(tensor: torch.Tensor) -> float:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(tensor.device), torch.cuda.graph(graph):
            tensor.mul_(2)
        graph.replay()
        return float(tensor.sum().item())

    here, there = (open_device(DeviceName("cuda", index)) for index in (0, 1))
    tensor = torch.ones(1000, device="cuda:0")
    assert doubled(tensor) == 2000
    with RamDisk(tmp_path / "ramdisk", 64 << 20).open_store(None) as store:
        switch = Switch(here, store)
        switch.suspend(boundary=1)
        switch.resume(there)
        assert doubled(tensor) == 4000
        switch.suspend(boundary=2)
        switch.resume(here)
        assert doubled(tensor) == 8000
    torch.cuda.graph.default_capture_stream = None  # as this process began


def test_generators_and_current_devices_follow_a_job() -> None:
    """In the main thread and in another one; a generator goes on with its own numbers."""
    own, expected = torch.Generator("cuda:0").manual_seed(5), torch.Generator("cuda:0").manual_seed(5)
    numbers = [torch.randn(8, device="cuda:0", generator=expected).tolist() for _ in range(2)]
    names, gate, seen = GpuNames(), ThreadGate(), []
    gate.carry_out = names.in_other_threads
    assert torch.randn(8, device="cuda:0", generator=own).tolist() == numbers[0]

    def elsewhere() -> None:
        with gate.mode():
            seen.extend([torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda")])

    try:
        with torch.cuda.device(0):
            names.follow(DeviceName("cuda", 0), DeviceName("cuda", 1))
        assert torch.ones(2, device="cuda").device.index == 1, "a block that began before the move has ended"
        with torch.cuda.device(0):
            assert torch.ones(2, device="cuda").device.index == 1
        drawn = torch.randn(8, device="cuda:0", generator=own)
        assert (drawn.device.index, drawn.tolist()) == (1, numbers[1])
        torch.cuda.set_device(0)
        assert torch.ones(2, device="cuda").device.index == 1
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert [tensor.device.index for tensor in seen] == [1, 1]
    finally:
        names.pause()
        assert _pop_mode() is names  # type: ignore[no-untyped-call]
    assert own.get_state().equal(expected.get_state())


def test_threads_of_a_fork_go_on_after_a_move() -> None:
    """They are under the gate, as all threads; a DataLoader's worker feeds its queue from one."""
    torch.ones(1, device="cuda:0")
    names, gate = GpuNames(), ThreadGate()
    gate.carry_out = names.in_other_threads
    sizes: list[int] = []

    def feed() -> None:
        with gate.mode():
            sizes.extend(torch.ones(2).size())

    try:
        names.follow(DeviceName("cuda", 0), DeviceName("cuda", 1))
        pid = os.fork()
        if pid == 0:
            thread = threading.Thread(target=feed)
            thread.start()
            thread.join()
            os._exit(0 if sizes == [2] else 1)
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        names.pause()
        assert _pop_mode() is names  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("undisturbed")
    done = run(
        CARELESS, directory, {"CUDASIM_ACCOUNT": str(directory / "account")}, "train.py", "nothing", *"000"
    )
    assert len(done.stdout) == 65, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("call", "code", "nth", "sticky"),
    [
        ("cudaMalloc", 2, 1, 0),
        ("cudaMalloc", 46, 1, 0),
        ("cudaMemcpyAsync", 1, 1, 0),
        ("cudaMemcpyAsync", 719, 2, 1),
        ("cudaStreamSynchronize", 719, 1, 1),
    ],
)
def test_a_careless_script_never_sees_a_resume_that_cuda_fails(
    tmp_path: Path, script_environ: Environ, undisturbed: str, call: str, code: int, nth: int, sticky: int
) -> None:
    command = ["-m", "gpuslice", "run", "--device", "cuda:0", "--suspend-at", "4", "train.py"]
    done = run(CARELESS, tmp_path, script_environ, *command, call, str(code), str(nth), str(sticky))
    assert "skipped" not in done.stdout, done.stderr
    if done.returncode == 0:
        assert done.stdout == undisturbed
    else:
        assert done.returncode in (3, -signal.SIGABRT, 128 + signal.SIGABRT), done.stderr
        assert done.stdout == ""
    saved = torch.load(tmp_path / "good.pt", map_location="cpu", weights_only=True)
    assert all(value.norm() > 0 for value in saved.values())
