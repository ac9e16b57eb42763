"""Tagged JSON: what goes in comes out, and nothing else goes in."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict, defaultdict
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.checkpoint.format import tree
from gpuslice.checkpoint.format.tree import decode, encode
from gpuslice.errors import CorruptSnapshotError, UsageError

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
keys = st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


def same(left: Any, right: Any) -> bool:
    """Equal with equal types all the way down; 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left), list(right)) and same(list(left.values()), list(right.values()))
    if isinstance(left, float):
        return left.hex() == right.hex()
    return bool(left == right)


@given(values)
def test_values_come_back(value: object) -> None:
    assert same(decode(encode(value)), value)


def test_the_numbers_that_json_cannot_hold() -> None:
    value = [2**53, -(2**53), 2**53 + 1, -(2**200), math.inf, -math.inf, 5e-324, -0.0, 10**6000]
    assert same(decode(encode(value)), value)
    assert math.isnan(decode(encode(math.nan)))


@pytest.mark.parametrize(
    "value",
    [
        torch.Size([2, 3]),
        torch.Size([]),
        torch.float8_e5m2,
        torch.device("cuda:1"),
        np.float32(1.5),
        np.float64(0.1),
        np.int64(-3),
        np.bool_(True),
        np.longdouble(0.1),
        np.datetime64("2026-01-01"),
    ],
)
def test_types_of_torch_and_numpy_come_back(value: object) -> None:
    back = decode(encode({"x": [value]}))["x"][0]
    assert type(back) is type(value)
    assert back == value


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"a": [1, object()]}, "builtins.object"),
        ({"model": {"w": torch.zeros(1)}}, "torch.Tensor"),
        ({"c": Colour.RED}, "Colour"),
        (defaultdict(list), "collections.defaultdict"),
        ([lambda: None], "builtins.function"),
        (OrderedDict(a=1), "collections.OrderedDict"),
        ({"s": {1, 2}}, "builtins.set"),
        ({"a": np.zeros(2)}, "numpy.ndarray"),
        ({"a": np.array((1, 2.0), "i4,f8")[()]}, "numpy.void"),
        ({(1, object()): 1}, "builtins.object"),
        ({"s": ["\ud800"]}, "surrogates not allowed"),
    ],
)
def test_anything_else_is_an_error_that_names_the_path_and_the_reason(value: object, reason: str) -> None:
    with pytest.raises(UsageError, match=rf"^the log cannot be saved: .*{reason}"):
        encode(value, path="the log")


def test_depth_has_a_limit_and_cycles_end() -> None:
    deep: list[Any] = []
    for _ in range(tree.DEPTH_LIMIT - 1):
        deep = [deep]
    assert same(decode(encode(deep)), deep)
    with pytest.raises(UsageError, match="nested"):
        encode([[deep]])
    cycle: dict[str, Any] = {}
    cycle["self"] = cycle
    with pytest.raises(UsageError, match="nested"):
        encode(cycle)


@pytest.mark.parametrize("leaf", [None, 2**60, 1.5, 1j, b"x", np.int8(1), torch.float32, torch.Size([2])])
def test_what_holds_nothing_may_be_in_the_deepest_list(leaf: object) -> None:
    value = leaf
    for _ in range(tree.DEPTH_LIMIT):
        value = [value]
    assert same(decode(encode(value)), value)
    with pytest.raises(UsageError, match="nested"):
        encode([value])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b'{"a":1}',
        b"1.5",
        b"[]",
        b"[1]",
        b'["dict",1]',
        b'["dict",[1]]',
        b'["dict",[["list"],1]]',
        b'["unknown"]',
        b'["float",1]',
        b'["float","abc"]',
        b'["float","1"]',
        b'["float","nan "]',
        b'["int","0x1"]',
        b'["int","12z"]',
        b'["bytes","*"]',
        b'["tensor","strided",["0"],null]',
        b'["tensor","strided",[-1],null]',
        b'["tensor",1]',
        b'["scalar","<f8",[2],"AAAA"]',
        b'["scalar","<f8",[],"AAAA"]',
        b'["scalar","O",[],"AAAAAAAAAAA="]',
        b'["scalar","<f8",[1],"AAAAAAAAAAA="]',
        b'["dtype","load"]',
        b'["dtype","__name__"]',
        b'["device","nowhere"]',
        b'["size","a"]',
        b'["codec","os.system","ls"]',
        b'["list" ]',
        b'"\xff"',
        b'["list",' * 300 + b'["list"]' + b"]" * 300,
        b"[" * 100_000,
    ],
)
def test_malformed_trees_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptSnapshotError):
        decode(data)


words = st.sampled_from([*tree._BUILDERS, "tensor", "codec", "AAA=", "<f8", "1", "0x1.8p+1"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(),
    lambda inner: st.lists(words | inner, max_size=5),
    max_leaves=12,
)


def decodes_or_is_corrupt(data: bytes) -> bool:
    with contextlib.suppress(CorruptSnapshotError):
        decode(data)
    return True


@given(json_values)
def test_no_json_makes_decode_crash(value: object) -> None:
    assert decodes_or_is_corrupt(msgspec.json.encode(value))


@given(st.binary(max_size=40))
def test_no_bytes_make_decode_crash(data: bytes) -> None:
    assert decodes_or_is_corrupt(data)
