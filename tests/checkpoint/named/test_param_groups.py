"""Groups that were added after attach are made again, of the attached modules' parameters."""

from __future__ import annotations

import pytest
import torch

from gpuslice.checkpoint.named.param_groups import skip_groups_that_are_there
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.errors import RefusedSnapshotError

from ..named_state import reload


def made(*, unfrozen: bool) -> dict[str, object]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 3))
    optimizer = torch.optim.Adam(model[0].parameters(), lr=0.1)
    if unfrozen:
        optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.5})
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_a_group_that_is_not_there_is_made(store: JobStore) -> None:
    saved, live = made(unfrozen=True), made(unfrozen=False)
    reload(store, saved, live)
    optimizer, model = live["optimizer"], live["model"]
    assert isinstance(optimizer, torch.optim.Adam)
    assert isinstance(model, torch.nn.Sequential)
    first, second = optimizer.param_groups
    assert (first["lr"], second["lr"]) == (0.1, 0.5)
    assert [*map(id, second["params"])] == [*map(id, model[1].parameters())]
    original = saved["optimizer"]
    assert isinstance(original, torch.optim.Adam)
    weight = original.param_groups[1]["params"][0]
    moment = optimizer.state[model[1].weight]["exp_avg"]
    assert torch.equal(moment, original.state[weight]["exp_avg"])


def test_a_group_of_parameters_that_nothing_attached_has_is_refused(store: JobStore) -> None:
    saved, live = made(unfrozen=True), made(unfrozen=False)
    with pytest.raises(RefusedSnapshotError, match="optimizer has other parameter groups than were saved"):
        reload(store, saved, {"optimizer": live["optimizer"]})


def test_adding_a_restored_group_again_changes_nothing() -> None:
    named = made(unfrozen=True)
    optimizer, model = named["optimizer"], named["model"]
    assert isinstance(optimizer, torch.optim.Adam)
    assert isinstance(model, torch.nn.Sequential)
    end = skip_groups_that_are_there([optimizer])
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 9.0})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert len(optimizer.param_groups) == 3
    end()
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": model[1].parameters()})
