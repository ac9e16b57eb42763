"""What the Pythons of the tests leave out (quick/sitecustomize.py) is there as soon as a script needs it."""

from __future__ import annotations

import os
import subprocess
import sys

from .conftest import QUICK
from .patience import PATIENCE_S

SCRIPT = """
import sys
import torch
def loaded():
    names = "torch._dynamo.convert_frame", "torch._inductor.utils", "torch._prims", "torch.export.unflatten"
    return [name for name in names if name in sys.modules]
def compiler(graph, inputs):
    graphs.append(graph)
    return graph.forward
def train():
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
graphs = []
torch.use_deterministic_algorithms(True)
assert torch.Generator().manual_seed(3).initial_seed() == 3
model = torch.nn.Linear(2, 2)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
train()
print(loaded())
model = torch.compile(model, backend=compiler)
train()
print(loaded()[:3])
print(len(graphs), torch._dynamo.utils.counters["stats"]["unique_graphs"], model.weight.tolist())
exported = torch.export.export(torch.nn.Conv2d(1, 2, 3), (torch.ones(1, 1, 5, 5),))
print(loaded()[3:], exported.module()(torch.ones(1, 1, 5, 5)).shape)
print(torch._inductor.config.deterministic, torch._inductor.list_mode_options("reduce-overhead"))
"""


def run(script: str) -> list[str]:
    """Run a script in a Python like those that tests start; return the lines that it prints."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([QUICK, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_the_compiler_is_loaded_when_something_is_compiled() -> None:
    assert run(SCRIPT) == [
        "[]",
        "['torch._dynamo.convert_frame', 'torch._inductor.utils', 'torch._prims']",
        "1 1 [[-3.0, -3.0], [-3.0, -3.0]]",
        "['torch.export.unflatten'] torch.Size([1, 2, 3, 3])",
        "True {'triton.cudagraphs': True}",
    ]


SHARDS = """
import torch
from torch.distributed import init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
sharded = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
print((sharded @ sharded.T).sum().full_tensor().item())
"""


def test_shapes_of_shards_are_computed() -> None:
    assert run(SHARDS) == ["32.0"]
