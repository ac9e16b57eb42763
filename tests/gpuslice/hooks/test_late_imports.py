"""What libraries leave behind is hidden before the first module is made, unless a tensor lives already."""

from __future__ import annotations

import pytest

from ..conftest import Workshop

#: Leaves objects as a library does, makes modules, and says how many of those objects a look would see.
SCRIPT = """
import gc, sys, torch
begun = torch.nn.Module.__init__
class Left:
    def __init__(self):
        self.itself = self
left = [Left() for _ in range(100)]
if "tensor" in sys.argv:
    data = torch.ones(3)
import layers
seen = lambda: sum(type(one) is Left for one in gc.get_objects())
print(seen(), torch.nn.Module.__init__ is begun)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 1)
net = Net()
print(seen(), torch.nn.Module.__init__ is begun)
from gpuslice.checkpoint.discover.live_instances import name_of
print(name_of(net.inner.weight.untyped_storage(), "a label"))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(torch.ones(8, 3), batch_size=2):
    net.inner(batch).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("words", "after"), [((), 0), (("tensor",), 100)], ids=["nothing lives", "a tensor"])
def test_they_are_hidden_at_the_first_module_outside_of_imports(
    warm_workshop: Workshop, words: tuple[str, ...], after: int
) -> None:
    warm_workshop.write("layers.py", "import torch\nkept = torch.nn.Identity()\n")
    script = str(warm_workshop.write("train.py", SCRIPT))
    done = warm_workshop.gpuslice_run("--suspend-every", "2", script, *words)
    assert done.stdout.splitlines() == ["100 True", f"{after} False", "Net.inner.weight (a label)"], (
        done.stderr
    )
    assert "2 switches" in done.stderr
