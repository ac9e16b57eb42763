"""Tagged JSON: what goes in comes out, and nothing else goes in."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict, defaultdict
from enum import IntEnum
from pathlib import PurePosixPath
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.checkpoint.format import tree
from gpuslice.checkpoint.format.tree import Tree, decode, encode, register_codec
from gpuslice.errors import CorruptSnapshotError, RefusedSnapshotError, UsageError

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
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
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
        np.datetime64("2026-01-01"),
        bytearray(b"ab"),
    ],
)
def test_types_of_torch_and_numpy_come_back(value: object) -> None:
    back = decode(encode({"x": [value]}))["x"][0]
    assert type(back) is type(value)
    assert back == value


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">u2").reshape(2, 3),
        np.zeros((0, 4), np.float16),
        np.array(2.5),
        np.asfortranarray(np.eye(3)),
        np.array(["a", "bc"]),
    ],
)
def test_arrays_come_back_and_can_be_written(array: np.ndarray[Any, Any]) -> None:
    back = decode(encode(array))
    assert type(back) is np.ndarray
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert np.array_equal(back, array)
    assert back.flags.writeable


def test_a_generators_state_comes_back() -> None:
    state = np.random.default_rng(5).bit_generator.state
    assert decode(encode(state)) == state
    legacy = decode(encode(np.random.RandomState(3).get_state()))
    np.random.RandomState().set_state(legacy)


def test_encoding_does_not_depend_on_the_order_of_a_set() -> None:
    forward, backward = set("abcdefgh"), set("hgfedcba")
    assert encode(forward) == encode(backward)


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, object()]}, "a.1 is a builtins.object"),
        ({"model": {"w": torch.zeros(1)}}, "model.w is a torch.Tensor"),
        ({"c": Colour.RED}, "c is a .*Colour"),
        (defaultdict(list), "the value is a collections.defaultdict"),
        ([lambda: None], "0 is a builtins.function"),
        ({"a": np.array([object()])}, "a is an array of object"),
        ({(1, object()): 1}, r"is a builtins.object"),
        ({"s": ["\ud800"]}, "s.0 is not valid Unicode"),
    ],
)
def test_anything_else_is_an_error_that_names_the_path(value: object, path: str) -> None:
    with pytest.raises(UsageError, match=path):
        encode(value)


def test_depth_has_a_limit_and_cycles_end() -> None:
    deep: list[Any] = []
    for _ in range(tree.DEPTH_LIMIT - 1):
        deep = [deep]
    assert same(decode(encode(deep)), deep)
    with pytest.raises(UsageError, match="nested"):
        encode([[deep]])
    cycle: dict[str, Any] = {}
    cycle["self"] = cycle
    with pytest.raises(UsageError, match=r"self\.self"):
        encode(cycle)


@pytest.mark.parametrize("leaf", [None, 2**60, 1.5, 1j, b"x", np.int8(1), torch.float32, torch.Size([2])])
def test_what_holds_nothing_may_be_in_the_deepest_list(leaf: object) -> None:
    value = leaf
    for _ in range(tree.DEPTH_LIMIT):
        value = [value]
    assert same(decode(encode(value)), value)
    with pytest.raises(UsageError, match="nested"):
        encode([value])


def test_a_codec_teaches_one_type() -> None:
    register_codec("pure-path", PurePosixPath, str, PurePosixPath)
    register_codec("pure-path", PurePosixPath, str, PurePosixPath)
    assert decode(encode({"p": PurePosixPath("/a")})) == {"p": PurePosixPath("/a")}
    with pytest.raises(UsageError, match="collides"):
        register_codec("pure-path", Colour, int, Colour)
    with pytest.raises(UsageError, match="collides"):
        register_codec("another", PurePosixPath, str, PurePosixPath)


def test_a_codec_may_teach_what_is_refused_of_numpy() -> None:
    pair = np.array((1, 2.0), "i4,f8")[()]
    with pytest.raises(UsageError, match="an array of"):
        encode(pair)
    register_codec("pair", np.void, np.void.item, lambda values: np.array(values, "i4,f8")[()])
    assert same(decode(encode(pair)), pair)


def test_a_codec_that_is_not_here_is_refused() -> None:
    with pytest.raises(RefusedSnapshotError, match=r"'os\.system'"):
        decode(Tree(b'["codec","os.system","ls"]'))


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
        b'["array","<f8",[2],"AAAA"]',
        b'["array","O",[1],"AAAAAAAAAAA="]',
        b'["array","<f8",[-1,-1],"AAAAAAAAAAA="]',
        b'["array","<f8",[9223372036854775807,0],""]',
        b'["dtype","load"]',
        b'["dtype","__name__"]',
        b'["device","nowhere"]',
        b'["size","a"]',
        b'["codec",["list"],1]',
        b'["list" ]',
        b'"\xff"',
        b'["list",' * 300 + b'["list"]' + b"]" * 300,
        b"[" * 100_000,
    ],
)
def test_malformed_trees_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptSnapshotError):
        decode(Tree(data))


words = st.sampled_from([*tree._BUILDERS, "tensor", "codec", "AAA=", "<f8", "1", "0x1.8p+1"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(),
    lambda inner: st.lists(words | inner, max_size=5),
    max_leaves=12,
)


def decodes_or_is_corrupt(data: bytes) -> bool:
    with contextlib.suppress(CorruptSnapshotError, RefusedSnapshotError):
        decode(Tree(data))
    return True


@given(json_values)
def test_no_json_makes_decode_crash(value: object) -> None:
    assert decodes_or_is_corrupt(msgspec.json.encode(value))


@given(st.binary(max_size=40))
def test_no_bytes_make_decode_crash(data: bytes) -> None:
    assert decodes_or_is_corrupt(data)
