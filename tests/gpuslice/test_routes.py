"""``gpuslice run --route``: taken or refused by name, and told to the user."""

from __future__ import annotations

import json

import pytest
import torch

from .conftest import Workshop

SCRIPT = """
import hashlib, sys, torch
device = sys.argv[1]
torch.manual_seed(1)
torch.use_deterministic_algorithms(True)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).to(device)
optimizer = torch.optim.Adam(model.parameters())
data = torch.randn(48, 64)
for batch in torch.utils.data.DataLoader(data, batch_size=4, shuffle=True):
    optimizer.zero_grad()
    model(batch.to(device)).square().mean().backward()
    optimizer.step()
digest = hashlib.sha256()
for value in model.state_dict().values():
    digest.update(value.cpu().numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.parametrize("route", ["vmm", "driver"])
def test_a_route_that_cannot_be_taken_stops_before_the_script(workshop: Workshop, route: str) -> None:
    script = workshop.write("train.py", "print('started')")
    done = workshop.gpuslice_run("--device", "cpu", "--route", route, str(script))
    assert done.returncode == 3
    assert done.stdout == ""
    assert f"the route {route} cannot be taken on cpu" in done.stderr
    assert "use --route tensor" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
@pytest.mark.parametrize("route", ["vmm", "driver"])
def test_a_route_for_gpus_without_a_driver_stops_before_the_script(workshop: Workshop, route: str) -> None:
    done = workshop.gpuslice_run("--route", route, str(workshop.write("train.py", "print('started')")))
    assert (done.returncode, done.stdout) == (3, "")
    assert f"--route {route} needs an NVIDIA driver" in done.stderr
    assert "use --route tensor" in done.stderr


def test_the_route_of_auto_is_told(warm_workshop: Workshop) -> None:
    script = warm_workshop.write("train.py", SCRIPT)
    report = warm_workshop.directory / "report.json"
    words = ("--route", "auto", "--suspend-every", "5", "--report", str(report), str(script), "cpu")
    done = warm_workshop.gpuslice_run(*words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.rstrip().endswith("route tensor")
    assert {switch["route"] for switch in json.loads(report.read_text())["switches"]} == {"tensor"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("route", ["tensor", "vmm"])
def test_an_unmodified_script_on_a_gpu(workshop: Workshop, route: str) -> None:
    workshop.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    script = str(workshop.write("train.py", SCRIPT))
    report = workshop.directory / "report.json"
    plain = workshop.python(script, "cuda:0")
    words = ("--device", "cuda:0", "--route", route, "--suspend-every", "3", "--report", str(report))
    done = workshop.gpuslice_run(*words, script, "cuda:0")
    assert (plain.returncode, done.returncode) == (0, 0), plain.stderr + done.stderr
    assert done.stdout == plain.stdout
    switches = json.loads(report.read_text())["switches"]
    assert switches
    assert all(switch["route"] == route and switch["bytes_freed"] > 0 for switch in switches)
