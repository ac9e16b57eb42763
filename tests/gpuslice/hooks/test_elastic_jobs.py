"""A script that cannot grow is refused where it would begin to train under `--devices 1:4`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuslice.errors import UsageError
from gpuslice.hooks.elastic_jobs import check_group
from tests.gpuslice.conftest import Workshop

PLAIN = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(1, 2)).sum().backward()
print("trains", flush=True)
optimizer.step()
print("has trained")
"""


def test_a_script_that_trains_without_knowing_ends_with_a_message(warm_workshop: Workshop) -> None:
    warm_workshop.environ |= {"GPUSLICE_ELASTIC": "True"}
    script = warm_workshop.write("plain.py", PLAIN)
    done = warm_workshop.gpuslice_run(str(script))
    assert done.returncode == 2, done.stderr
    assert done.stdout == "trains\n"
    assert "its script trains without knowing" in done.stderr
    assert "use gpuslice.elastic" in done.stderr


@pytest.mark.parametrize("attached", [None, SimpleNamespace(replicated=False)])
def test_a_process_group_of_the_scripts_own_is_refused(attached: Any) -> None:
    with pytest.raises(UsageError, match="makes a process group of its own"):
        check_group(cast(Any, SimpleNamespace(attached=attached)))
    check_group(cast(Any, SimpleNamespace(attached=SimpleNamespace(replicated=True))))
