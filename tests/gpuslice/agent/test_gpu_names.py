"""A GPU that a script names by its number, after the job has moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode, _pop_mode

from gpuslice.agent.gpu_names import GpuNames
from gpuslice.types import DeviceName

FIRST, NOW = DeviceName("cuda", 0), DeviceName("cuda", 2)
THERE = torch.device("cuda", 2)


@pytest.fixture
def names() -> Iterator[GpuNames]:
    names = GpuNames()
    names.follow(FIRST, NOW)
    yield names
    names.pause()
    assert _pop_mode() is names  # type: ignore[no-untyped-call]


def given(names: GpuNames, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return names.__torch_function__(lambda *a, **k: (a, k), (), args, kwargs)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["cuda:0", torch.device("cuda:0"), torch.device("cuda", 0)])
def test_the_first_gpu_by_name_is_the_present_one(names: GpuNames, name: object) -> None:
    args, kwargs = given(names, 1, name, device=name)
    assert args[1] in (THERE, str(THERE))
    assert kwargs["device"] in (THERE, str(THERE))


def test_other_devices_and_numbers_mean_what_they_say(names: GpuNames) -> None:
    others = (
        0,
        True,
        "cuda",
        "cpu",
        torch.device("cuda"),
        torch.device("cuda:1"),
        THERE,
        torch.device("cpu"),
    )
    assert given(names, *others) == (others, {})


def test_to_and_cuda_take_a_number(names: GpuNames, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr("gpuslice.agent.gpu_names._BY_NUMBER", (seen.append,))
    names.__torch_function__(seen.append, (), (0,))
    names.__torch_function__(seen.append, (), (1,))
    assert seen == [THERE, 1]


def test_a_paused_one_and_one_at_home_change_nothing(names: GpuNames) -> None:
    names.pause()
    assert given(names, "cuda:0") == (("cuda:0",), {})
    names.follow(FIRST, FIRST)
    assert given(names, "cuda:0") == (("cuda:0",), {})


def test_it_lies_below_what_the_script_leaves_again() -> None:
    class Script(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    names = GpuNames()
    with torch.device("meta"):
        with Script():
            names.follow(FIRST, NOW)
        assert torch.ones(2).device.type == "meta"
        with torch.device("cpu"):
            assert torch.ones(2).device.type == "cpu"
        assert torch.ones(2).device.type == "meta"
    assert torch.ones(2).device.type == "cpu"
    names.pause()
    assert _pop_mode() is names  # type: ignore[no-untyped-call]


def test_a_default_device_stays_at_the_bottom() -> None:
    names = GpuNames()
    torch.set_default_device("meta")
    try:
        names.follow(FIRST, NOW)
        assert torch.ones(2).device.type == "meta"
    finally:
        names.pause()
        torch.set_default_device(None)
    assert torch.ones(2).device.type == "cpu"
    assert _pop_mode() is names  # type: ignore[no-untyped-call]


def test_a_device_of_the_scripts_is_the_present_one(names: GpuNames) -> None:
    assert torch.device("cuda", 0) == torch.device("cuda:0") == torch.device(type="cuda", index=0)
    assert torch.device("cuda", 0).index == 2
    assert torch.device("cuda", 1).index == 1


def test_other_threads_get_the_present_gpu_only_where_cuda_has_begun(
    names: GpuNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a fork it has not, and its threads run under the same mode: a DataLoader's worker has one."""
    current: list[int] = []
    monkeypatch.setattr("torch.cuda.set_device", current.append)
    for begun, expected in ((False, []), (True, [2]), (True, [2])):
        monkeypatch.setattr("gpuslice.kernels.cuda.runtime_calls.has_begun", lambda begun=begun: begun)
        assert names.in_other_threads(len, (), ("ab",), {}) == 2
        assert current == expected


def test_a_default_by_number_is_the_present_one(names: GpuNames, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(**kwargs: object) -> dict[str, object]:
        return kwargs

    monkeypatch.setattr("torch.utils._device._device_constructors", lambda: {make})
    names.pause()
    first = torch.device("cuda", 0)
    monkeypatch.setattr("torch.utils._device.CURRENT_DEVICE", first)
    names.follow(FIRST, NOW)
    assert names.__torch_function__(make, ()) == {"device": THERE}
    assert names.__torch_function__(make, (), (), {"device": torch.device("cpu")}) == {
        "device": torch.device("cpu")
    }
