"""Unmodified scripts on the simulated GPU, under ``gpuslice run``: the digest of an undisturbed run."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from ..gpuslice.conftest import Finished, Workshop

#: Trains with what a GPU's script has; says what it computed. Words: the device, then options.
TRAIN = """
import hashlib, os, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device, options = torch.device(sys.argv[1]), sys.argv[2:]
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(96, 64))
losses = []
for (batch,) in DataLoader(data, batch_size=4, shuffle=True, pin_memory=True):
    batch = batch.to(device, non_blocking=True)
    loss = model(batch + 0.1 * torch.randn_like(batch)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
digest = hashlib.sha256(repr(losses).encode())
for value in (*model.state_dict().values(), torch.cuda.get_rng_state(device)):
    digest.update(value.cpu().numpy().tobytes())
print(digest.hexdigest())
if "gpus" in options:
    import cudasim
    print([physical for physical in range(2) if cudasim.used_bytes(physical)])
"""
#: A step that is captured once and replayed; only the vmm route can take it along.
GRAPHED = """
import hashlib, sys, torch
from torch.utils.data import DataLoader
torch.manual_seed(1)
model = torch.nn.Linear(64, 1).to("cuda:0")
optimizer = torch.optim.Adam(model.parameters(), capturable=True)
static = torch.zeros(4, 64, device="cuda:0")

def step():
    optimizer.zero_grad(set_to_none=False)
    model(static + 0.1 * torch.randn_like(static)).square().mean().backward()
    optimizer.step()

side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(2):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="thread_local"):
    step()
for batch in DataLoader(torch.randn(48, 64), batch_size=4):
    static.copy_(batch)
    graph.replay()
digest = hashlib.sha256()
for value in model.state_dict().values():
    digest.update(value.cpu().numpy().tobytes())
print(digest.hexdigest())
"""


def undisturbed(workshop: Workshop, *words: str) -> str:
    done = workshop.python(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def switches(report: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(report.read_text())["switches"]
    return found


@pytest.mark.parametrize(
    "options",
    [(), ("--no-verify",), ("--route", "auto")],
    ids=["plain", "no_verify", "auto"],
)
def test_the_tensor_route(warm_workshop: Workshop, options: tuple[str, ...]) -> None:
    script, report = str(warm_workshop.write("train.py", TRAIN)), warm_workshop.directory / "report.json"
    words = ("--device", "cuda:0", *options, "--suspend-every", "3", "--report", str(report))
    done = warm_workshop.gpuslice_run(*words, script, "cuda:0")
    assert done.returncode == 0, done.stderr
    assert done.stdout == undisturbed(warm_workshop, script, "cuda:0")
    found = switches(report)
    assert len(found) == 8
    assert all(switch["held"]["context_and_libraries"] >= 64 << 20 for switch in found)
    assert all(switch["route"] == "tensor" and switch["bytes_freed"] > 0 for switch in found)


@pytest.mark.parametrize("source", [TRAIN, GRAPHED], ids=["train", "graphed"])
def test_the_vmm_route(workshop: Workshop, warm_workshop: Workshop, source: str) -> None:
    script, report = str(workshop.write("train.py", source)), workshop.directory / "report.json"
    words = ("--device", "cuda:0", "--route", "vmm", "--suspend-every", "3", "--report", str(report))
    done = workshop.gpuslice_run(*words, script, "cuda:0")
    assert done.returncode == 0, done.stderr
    assert done.stdout == undisturbed(warm_workshop, script, "cuda:0")
    assert [switch["route"] for switch in switches(report)] == ["vmm"] * len(switches(report)) != []


def test_a_recorded_graph_is_refused_on_the_tensor_route(warm_workshop: Workshop) -> None:
    script = str(warm_workshop.write("train.py", GRAPHED))
    words = ("--device", "cuda:0", "--route", "tensor", "--suspend-every", "3", script)
    done = warm_workshop.gpuslice_run(*words)
    assert done.returncode != 0
    assert "CUDA graph" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_that_records_graphs_gets_the_vmm_route(workshop: Workshop, warm_workshop: Workshop) -> None:
    script, report = str(workshop.write("train.py", GRAPHED)), workshop.directory / "report.json"
    done = workshop.gpuslice_run(
        "--device", "cuda:0", "--suspend-every", "3", "--report", str(report), script
    )
    assert done.returncode == 0, done.stderr
    assert "records CUDA graphs, so its route is vmm" in done.stderr
    assert done.stdout == undisturbed(warm_workshop, script)
    assert {switch["route"] for switch in switches(report)} == {"vmm"}


@pytest.mark.two_gpus
def test_a_job_on_the_second_gpu_touches_no_other(warm_workshop: Workshop) -> None:
    script = str(warm_workshop.write("train.py", TRAIN))
    done = warm_workshop.gpuslice_run("--device", "cuda:1", "--suspend-every", "5", script, "cuda:1", "gpus")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[1]"


def attached(meanwhile: str) -> str:
    """The script with named state, which does something once, after its eleventh batch."""
    return (
        TRAIN.replace("import hashlib", "import gpuslice, hashlib")
        .replace(
            "for (batch,) in DataLoader(data, batch_size=4, shuffle=True, pin_memory=True):",
            "loader = DataLoader(data, batch_size=4, shuffle=True, pin_memory=True)\n"
            "job = gpuslice.attach(model=model, optimizer=optimizer, losses=losses, loader=loader)\n"
            "for (batch,) in job.batches(loader):",
        )
        .replace(
            "    losses.append(loss.item())",
            "    losses.append(loss.item())\n"
            "    if len(losses) == 11 and os.path.exists('once'):\n"
            f"        os.unlink('once'); {meanwhile}",
        )
    )


def switch_with(order: str, during: str) -> str:
    """A suspend and a resume in the script; before the one of ``during`` it gives ``order``."""
    steps = (order, "job.suspend()") if during == "suspend" else ("job.suspend()", order)
    return "; ".join(["import cudasim", *steps, "job.resume()"])


def dies_and_goes_on(workshop: Workshop, meanwhile: str, *options: str) -> Finished:
    """The run that ends by ``meanwhile``; the next one has to end as if nothing had been."""
    script = str(workshop.write("train.py", attached(meanwhile)))
    expected = undisturbed(workshop, script, "cuda:0")
    workshop.write("once", "")
    words = ("--device", "cuda:0", "--job", "mnist", *options, script, "cuda:0")
    died = workshop.gpuslice_run(*words)
    done = workshop.gpuslice_run(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected
    return died


def test_restarts_after_checkpoints_and_kill(warm_workshop: Workshop) -> None:
    """Killed at a step of its own, it goes on from the last checkpoint and ends as if nothing had been."""
    died = dies_and_goes_on(warm_workshop, "os.kill(os.getpid(), 9)", "--checkpoint-every", "4")
    assert died.returncode == -signal.SIGKILL


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("during", "call"),
    [
        *(("suspend", call) for call in ("cudaMemcpyAsync", "cudaStreamSynchronize", "cudaFree")),
        *(("resume", call) for call in ("cudaMalloc", "cudaMemcpyAsync", "cudaStreamSynchronize")),
    ],
)
def test_a_process_that_is_killed_at_a_call_of_a_switch_goes_on_from_its_last_snapshot(
    warm_workshop: Workshop, during: str, call: str
) -> None:
    """Whether that snapshot was the one before or the one of this switch, the digest is right."""
    fault = switch_with(f"cudasim.fail({call!r}, cudasim.KILLED)", during)
    died = dies_and_goes_on(warm_workshop, fault, "--checkpoint-every", "4")
    assert died.returncode == -signal.SIGKILL


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("during", "call"),
    [
        *(("resume", call) for call in ("cudaMalloc", "cudaMemcpyAsync", "cudaLaunchKernel")),
        *((during, "cudaStreamSynchronize") for during in ("suspend", "resume")),
        *(("suspend", call) for call in ("cudaMemcpyAsync", "cudaDeviceSynchronize", "cudaFree")),
    ],
)
def test_a_sticky_error_in_a_switch_ends_the_process_and_keeps_the_snapshot(
    warm_workshop: Workshop, during: str, call: str
) -> None:
    """Nothing is printed that was computed from wrong bytes; started again, the digest is right."""
    died = dies_and_goes_on(warm_workshop, switch_with(f"cudasim.fail({call!r}, 719, sticky=True)", during))
    assert died.returncode != 0
    assert died.stdout == ""


@pytest.mark.two_gpus
@pytest.mark.parametrize(
    "first",
    [
        "import os; os.environ['CUDA_VISIBLE_DEVICES'] = '1'",
        "import os; pid = os.fork(); torch.ones(1, device='cuda').item(); pid or os._exit(0); "
        "assert os.waitpid(pid, 0)[1] == 0",
    ],
    ids=["visible_devices", "fork"],
)
def test_the_environment_is_the_scripts_until_it_begins_cuda(warm_workshop: Workshop, first: str) -> None:
    script = str(warm_workshop.write("train.py", f"import torch\n{first}\n{TRAIN}"))
    done = warm_workshop.gpuslice_run("--device", "cuda:0", "--suspend-every", "5", script, "cuda:0", "gpus")
    assert done.returncode == 0, done.stderr
    assert done.stdout == undisturbed(warm_workshop, script, "cuda:0", "gpus")


@pytest.mark.simulated
def test_the_doctor_finds_everything_in_order(workshop: Workshop) -> None:
    import sys

    done = workshop.execute([sys.executable, "-m", "gpuslice", "doctor", "--check"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Simulated GPU" in done.stdout
    assert "same bytes" in done.stdout


@pytest.mark.two_gpus
def test_the_doctor_measures_links_and_keeps_what_it_found(workshop: Workshop) -> None:
    import sys

    workshop.environ |= {"CUDASIM_DEVICES": "2", "XDG_CACHE_HOME": str(workshop.directory / "cache")}
    doctor = [sys.executable, "-m", "gpuslice", "doctor", "--json"]
    before, measured, after = (
        json.loads(workshop.execute([*doctor, *words]).stdout)["measured"]
        for words in ([], ["--measure"], [])
    )
    assert before["rates"] == {}
    assert "not measured" in before["problems"][0]
    assert measured["problems"] == []
    assert all(rates[key] > 0 for rates in measured["rates"].values() for key in rates)
    assert [(peer["source"], peer["target"]) for peer in measured["peers"]] == [
        ("cuda:0", "cuda:1"),
        ("cuda:1", "cuda:0"),
    ]
    assert (after["rates"], after["peers"]) == (measured["rates"], measured["peers"])
    assert after["age_s"] > 0
