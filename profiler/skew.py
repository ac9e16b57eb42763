"""Tensor skew: the part of a model's gradients that one tensor holds (Tiresias, NSDI 2019, section 3.3).

In data-parallel training every trainable parameter's gradient is exchanged as one tensor. If one tensor holds
most of the bytes, its receiver is the bottleneck, and the job suffers from being spread over nodes. Nothing
here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from math import prod
from typing import Any

import msgspec
import numpy as np

from gpuslice.errors import UsageError
from gpuslice.types import CONSOLIDATION_SKEW

_PUBLISHED = "data/published_models.json"
#: Size of a published model's numbers.
_FLOAT_BYTES = 4


class SizeClass(msgspec.Struct, frozen=True):
    """The tensors of one size class: above half of ``at_most_bytes``, up to it."""

    at_most_bytes: int
    tensors: int
    bytes: int


class Skew(msgspec.Struct, frozen=True):
    """The skew of a model.

    Attributes
    ----------
    tensors, bytes
        How many trainable tensors there are, and their bytes together.
    largest_bytes
        Size of the largest of them.
    skew
        ``largest_bytes / bytes``, above 0 and at most 1.
    threshold
        The least skew at which the job should be consolidated.
    consolidate
        True if the job should run on as few nodes as possible. If not, it may be spread.
    distribution
        The tensors by powers of two of their sizes, smallest first.
    """

    tensors: int
    bytes: int
    largest_bytes: int
    skew: float
    threshold: float
    consolidate: bool
    distribution: tuple[SizeClass, ...]


def measure_skew(sizes_bytes: Iterable[int], threshold: float = CONSOLIDATION_SKEW) -> Skew:
    """Return the skew of a model with trainable tensors of ``sizes_bytes``. Empty tensors do not count.

    Raises
    ------
    UsageError
        If there is no tensor with any bytes.
    """
    sizes = np.array([size for size in sizes_bytes if size], dtype=np.int64)
    if not sizes.size:
        raise UsageError("the model has no trainable tensors", "give one with parameters that require grad")
    total, largest = int(sizes.sum()), int(sizes.max())
    skew = largest / total
    return Skew(
        len(sizes), total, largest, skew, threshold, skew >= threshold, tuple(_distribution(sizes.tolist()))
    )


def _distribution(sizes_bytes: list[int]) -> Iterable[SizeClass]:
    classes: dict[int, list[int]] = {}
    for size in sizes_bytes:
        classes.setdefault((size - 1).bit_length(), []).append(size)
    for power, members in sorted(classes.items()):
        yield SizeClass(1 << power, len(members), sum(members))


@cache
def published_models() -> Mapping[str, Skew]:
    """Return the skew of the models in Tiresias' evaluation, by their published layer shapes."""
    return {name: measure_skew(_sizes(model["tensors"])) for name, model in _published().items()}


def _published() -> dict[str, Any]:
    text = files("gpuslice.profiler").joinpath(_PUBLISHED).read_bytes()
    models: dict[str, Any] = msgspec.json.decode(text)
    return models


def _sizes(rows: list[tuple[list[int], int]]) -> Iterable[int]:
    for shape, count in rows:
        yield from [prod(shape) * _FLOAT_BYTES] * count
