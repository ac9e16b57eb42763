"""The device memory under arrays of other libraries, by their interface."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gpuslice.checkpoint.discover import foreign_arrays

BASE = np.zeros((8, 16), np.float32)


@pytest.mark.parametrize(
    "array",
    [
        BASE,
        BASE[2:5, 3:9],
        BASE[::-1],
        BASE[::3, ::-2],
        BASE.T,
        BASE[0, 0],
        BASE[4:4],
        np.broadcast_to(BASE[0], (4, 16)),
    ],
)
@pytest.mark.parametrize("strided", [True, False])
def test_the_extent_is_that_of_numpy(array: np.ndarray, strided: bool) -> None:
    array = np.asarray(array)
    if not strided:
        array = np.ascontiguousarray(array)
    interface: dict[str, Any] = {**array.__array_interface__}
    if strided:
        interface["strides"] = array.strides
    low, high = np.lib.array_utils.byte_bounds(array)
    expected = (low, high - low) if array.size else (interface["data"][0], 0)
    assert foreign_arrays.extent(interface) == expected


def test_types_of_libraries_are_found_and_those_of_torch_are_not() -> None:
    class Tsuccessors:
        __cuda_array_interface__: Any = None

    class Derived(Tsuccessors):
        pass

    class Unseen:
        __slots__ = ("__cuda_array_interface__",)

    found = foreign_arrays.kinds()
    assert Tsuccessors in found
    assert not {Derived, Unseen, torch.Tensor} & set(found)
    assert not [kind for kind in found if issubclass(kind, torch.Tensor)]
