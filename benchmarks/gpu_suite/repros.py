"""``repros --out FILE``: scripts that once went wrong over the simulated runtime.

Each runs plain and under ``gpuslice run`` with a suspend every third batch; both must print the same digest.
Exit code 1 if one does not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu_suite.measuring import Row, write

#: What all of them end with; ``state`` is what was trained.
LOOP = """
digest = hashlib.sha256()
for batch in DataLoader(torch.randn(48, 64), batch_size=4):
    step(batch.to("cuda:0"))
for value in state:
    digest.update(value.detach().cpu().numpy().tobytes())
print(digest.hexdigest())
"""
HEAD = "import hashlib, os, torch\nfrom torch.utils.data import DataLoader\n"
MODEL = """
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
model = model.to("cuda:0")
optimizer = torch.optim.Adam(model.parameters(), capturable=True)
state = list(model.parameters())
"""
STEP = """
def step(batch):
    global loss  # as at the top level of most scripts, it keeps its graph until the next step
    optimizer.zero_grad(set_to_none=False)
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
"""
FORK = """
if os.fork() == 0:
    torch.ones(1, device="cuda").item()
    os._exit(0)
assert os.wait()[1] == 0
"""
VISIBLE = "os.environ['CUDA_VISIBLE_DEVICES'] = '0'\n"
VIEW = """
torch.manual_seed(1)
owner = torch.randn(1 << 20, device="cuda:0")
view = torch.from_dlpack(owner.detach())
state = [owner, view]
def step(batch):
    owner.mul_(0.99).add_(batch.mean())
    assert torch.equal(owner, view), "the view sees other bytes than its owner"
"""
SMALL = """
state = [torch.full((100,), float(n), device="cuda:0") for n in range(4000)]
def step(batch):
    torch._foreach_add_(state, 1.0)
"""
GRAPH = """
static = torch.zeros(4, 64, device="cuda:0")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(2):
        train(static)
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="thread_local"):
    train(static)
def step(batch):
    static.copy_(batch)
    graph.replay()
"""
STREAMS = """
side, ahead = torch.cuda.Stream(), []
def step(batch):
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ahead.append(batch.cumsum(0))
    if len(ahead) > 1:
        torch.cuda.current_stream().wait_stream(side)
        train(ahead.pop(0))
"""


@dataclass(frozen=True, slots=True)
class Repro:
    """A script, the options of ``gpuslice run``, and what its environment has besides."""

    script: str
    options: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)


AS_TRAIN = STEP.replace("def step", "def train")
REPROS = {
    "an ordinary script": Repro(HEAD + MODEL + STEP + LOOP),
    "a fork before CUDA": Repro(HEAD + FORK + MODEL + STEP + LOOP),
    "CUDA_VISIBLE_DEVICES in the script": Repro(HEAD + VISIBLE + MODEL + STEP + LOOP),
    "a view through DLPack": Repro(HEAD + VIEW + LOOP),
    "4,000 small tensors": Repro(HEAD + SMALL + LOOP),
    "work on a side stream": Repro(HEAD + MODEL + AS_TRAIN + STREAMS + LOOP),
    "the vmm route": Repro(HEAD + MODEL + STEP + LOOP, ("--route", "vmm")),
    "a recorded graph": Repro(HEAD + MODEL + AS_TRAIN + GRAPH + LOOP, ("--route", "vmm")),
    "expandable segments": Repro(
        HEAD + MODEL + STEP + LOOP, environ={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    ),
}
DEADLINE_S = 60
#: Scripts that run at the same time.
AT_ONCE = 4 if (os.cpu_count() or 1) >= 8 else 1


def execute(command: list[str], environ: Mapping[str, str], directory: Path) -> tuple[int, str, str]:
    """Exit code, standard output, and the last line of standard error."""
    done = subprocess.run(
        command,
        env=dict(environ),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return done.returncode, done.stdout, (done.stderr.strip().splitlines() or ["it said nothing"])[-1]


def examine(repro: Repro, directory: Path) -> str:
    """What went wrong, or an empty string."""
    script, report = directory / "train.py", directory / "report.json"
    script.write_text(repro.script, encoding="utf-8")
    environ = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **repro.environ}
    words = ["--suspend-every", "3", "--report", str(report), *repro.options, str(script)]
    try:
        code, expected, said = execute([sys.executable, str(script)], environ, directory)
        if code != 0:
            return f"plain, it ended with {code}: {said}"
        run = [sys.executable, "-m", "gpuslice", "run", "--device", "cuda:0", *words]
        code, found, said = execute(run, environ, directory)
    except subprocess.TimeoutExpired:
        return f"it took longer than {DEADLINE_S} s"
    if code != 0:
        return f"under gpuslice it ended with {code}: {said}"
    if found != expected:
        return "under gpuslice it printed another digest"
    switches = json.loads(report.read_text(encoding="utf-8"))["switches"]
    return "" if len(switches) >= 3 else f"there were only {len(switches)} switches"


def examine_one(name: str) -> tuple[str, str]:
    """The script's name, and what went wrong."""
    with tempfile.TemporaryDirectory(prefix="gpuslice-repro-") as directory:
        return name, examine(REPROS[name], Path(directory))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=REPROS, default=list(REPROS))
    arguments = parser.parse_args()
    found: dict[str, str] = {}
    device = torch.device("cuda:0")
    result: Row = {"wrong": found}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for name, wrong in pool.map(examine_one, arguments.only):
            found[name] = wrong
            print(f"{name}: {wrong or 'right'}", flush=True)
            write(arguments.out, result, device)
    write(arguments.out, result | {"finished": True}, device)
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
