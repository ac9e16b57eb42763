"""Tensor skew: known sizes, and the models that Tiresias names."""

from __future__ import annotations

from math import prod

import msgspec
import pytest

from gpuslice.errors import UsageError
from gpuslice.profiler.skew import _published, measure_skew, published_models
from gpuslice.sched_core.placement.nodes import SkewAware
from gpuslice.types import CONSOLIDATION_SKEW

SKEWED = ("alexnet", "vgg11", "vgg16", "vgg19")
EVEN = ("googlenet", "inception3", "inception4", "resnet50", "resnet101", "resnet152")


def test_known_sizes() -> None:
    found = measure_skew([600, 0, 300, 100], threshold=0.6)
    assert (found.tensors, found.bytes, found.largest_bytes) == (3, 1000, 600)
    assert found.skew == pytest.approx(0.6)
    assert found.consolidate, "at the threshold"
    assert not measure_skew([600, 300, 100], threshold=0.61).consolidate


def test_the_distribution_holds_every_tensor_once_in_its_size_class() -> None:
    found = measure_skew([1, 2, 3, 4, 5, 1024, 1025]).distribution
    rows = [(one.at_most_bytes, one.tensors, one.bytes) for one in found]
    assert rows == [(1, 1, 1), (2, 1, 2), (4, 2, 7), (8, 1, 5), (1024, 1, 1024), (2048, 1, 1025)]


def test_a_model_without_tensors_has_no_skew() -> None:
    with pytest.raises(UsageError, match="no trainable tensors"):
        measure_skew([0])


def test_the_published_shapes_add_up_to_the_published_numbers_of_parameters() -> None:
    models = _published()
    assert set(models) == {*SKEWED, *EVEN}
    for name, model in models.items():
        assert sum(prod(shape) * count for shape, count in model["tensors"]) == model["parameters"], name


@pytest.mark.parametrize("name", SKEWED + EVEN)
def test_models_come_out_as_tiresias_found_them(name: str) -> None:
    found = published_models()[name]
    assert found.consolidate is (name in SKEWED)
    assert found.bytes == 4 * _published()[name]["parameters"]


def test_the_threshold_lies_well_between_both_groups() -> None:
    found = published_models()
    highest = max(found[name].skew for name in EVEN)
    lowest = min(found[name].skew for name in SKEWED)
    assert highest * 2 < CONSOLIDATION_SKEW < lowest / 2
    assert SkewAware()._threshold == CONSOLIDATION_SKEW


def test_as_json() -> None:
    found = msgspec.json.decode(msgspec.json.encode(measure_skew([4, 8])))
    distribution = found.pop("distribution")
    assert set(found) == {"tensors", "bytes", "largest_bytes", "skew", "threshold", "consolidate"}
    assert set(distribution[0]) == {"at_most_bytes", "tensors", "bytes"}
