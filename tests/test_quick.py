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
    return [name for name in ("torch._dynamo.convert_frame", "torch._inductor.utils") if name in sys.modules]
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


def test_the_compiler_is_loaded_when_something_is_compiled() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([QUICK, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "[]",
        "['torch._dynamo.convert_frame', 'torch._inductor.utils'] 1 1 [[-3.0, -3.0], [-3.0, -3.0]]",
        "True {'triton.cudagraphs': True}",
    ]
