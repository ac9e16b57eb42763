"""Scripts that record CUDA graphs, found by their source; and the route that they get."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuslice.config import Settings
from gpuslice.kernels import routes
from gpuslice.kernels.nvml import Driver, Gpu
from gpuslice.kernels.routes import Ground, TorchBuild
from gpuslice.launch.command import with_route
from gpuslice.launch.graph_use import find_graph_use

GRAPH = "import torch\nwith torch.cuda.graph(g):\n    step()\n"


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (GRAPH, 2),
        ("from torch import cuda\n\nwith cuda.graph(g): pass", 3),
        ("from torch.cuda import CUDAGraph\nCUDAGraph()", 2),
        ("torch.cuda.make_graphed_callables(f, a)", 1),
        ("model = torch.compile(model, mode='reduce-overhead')", 1),
        ("# torch.cuda.graph(g)\nprint('no CUDAGraph here')\nplot.graph(x)", 0),
        ("torch.compile(model, mode='max-autotune-no-cudagraphs')", 0),
        ("with torch.cuda.graph(", 0),
    ],
)
def test_a_script_says_it(tmp_path: Path, source: str, line: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    assert find_graph_use([str(script), "--lr", "1"]) == (f"train.py:{line}" if line else "")
    assert bool(find_graph_use(["--", "torchrun", "--nproc-per-node", "2", str(script)])) == bool(line)


def test_modules_beside_the_script_say_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    (tmp_path / "train.py").write_text("import torch, os\nfrom parts import steps\n")
    (tmp_path / "parts" / "steps.py").write_text("from . import missing\nimport train\n" + GRAPH)
    assert find_graph_use(["train.py"]) == find_graph_use(["-m", "train"]) == "steps.py:4"


def machine(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    found = tuple(Gpu(index, "GPU", f"GPU-{index}", "9.0", 1, 0) for index in range(gpus))
    ground = Ground(TorchBuild("2.11.0", "13.0"), Driver("580.1", "13.0", found), {})
    monkeypatch.setattr(Ground, "here", lambda: ground)
    monkeypatch.setattr(routes, "find_compiler", lambda environ: ["cc"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("settings", "gpus", "route"),
    [
        (Settings(route="auto", device="cuda:1"), 2, "vmm"),
        (Settings(route="auto"), 1, "vmm"),
        (Settings(route="auto"), 2, "auto"),
        (Settings(route="auto", device="cpu"), 1, "auto"),
        (Settings(route="tensor", device="cuda:0"), 1, "tensor"),
        (Settings(route="auto", device="cuda:0"), 0, "auto"),
    ],
)
def test_auto_becomes_vmm_where_it_works_and_the_gpu_is_certain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Settings, gpus: int, route: str
) -> None:
    machine(monkeypatch, gpus)
    script = tmp_path / "train.py"
    script.write_text(GRAPH)
    assert with_route(settings, [str(script)]).route == route
    script.write_text("import torch")
    assert with_route(settings, [str(script)]) == settings
