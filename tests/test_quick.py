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
    names = ("torch._dynamo.convert_frame", "torch._inductor.utils", "torch._refs")
    return [name for name in names if name in sys.modules]
def compiler(graph, inputs):
    graphs.append(graph)
    return graph.forward
def train():
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
graphs = []
torch.use_deterministic_algorithms(True)
model = torch.nn.Linear(2, 2)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
train()
print(loaded())
model = torch.compile(model, backend=compiler)
train()
print(loaded(), len(graphs), torch._dynamo.utils.counters["stats"]["unique_graphs"], model.weight.tolist())
print(torch._inductor.config.deterministic, torch._inductor.list_mode_options("reduce-overhead"))
"""


FAKE = """
import sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
print("torch._refs" in sys.modules)
with FakeTensorMode():
    print(torch.nn.functional.conv2d(torch.ones(1, 2, 4, 4), torch.ones(3, 2, 3, 3)).shape[1])
image, kernel = torch.ones(1, 2, 4, 4, device="meta"), torch.ones(3, 2, 3, 3, device="meta")
print(torch.nn.functional.conv2d(image, kernel).shape[1])
"""


def run(script: str) -> list[str]:
    """What it prints."""
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
        "['torch._dynamo.convert_frame', 'torch._inductor.utils', 'torch._refs'] 1 1"
        " [[-3.0, -3.0], [-3.0, -3.0]]",
        "True {'triton.cudagraphs': True}",
    ]


def test_kernels_for_no_device_are_loaded_with_the_first_fake_tensor() -> None:
    assert run(FAKE) == ["False", "3", "3"]
