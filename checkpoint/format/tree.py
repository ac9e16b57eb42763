"""Tagged JSON for everything that is not a tensor: what may be saved, and how it comes back.

A plain JSON ``null``, ``true``, ``false``, string, or integer up to 2**53 stands for itself. Anything
else is an array that begins with a tag. There are no JSON objects, no class is ever looked up by
name, and nothing is pickled; a value of another type is an error that names its path, until
`register_codec` teaches its type.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec

from gpuslice.errors import CorruptSnapshotError, RefusedSnapshotError, UsageError

from .tree_leaves import LEAVES, encode_leaf, named, stands_for_itself

DEPTH_LIMIT = 64

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tree:
    """An encoded value: canonical tagged JSON."""

    data: bytes


class _Codec(NamedTuple):
    type_: type
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


_codecs: dict[str, _Codec] = {}


def register_codec(
    name: str, type_: type[T], encode: Callable[[T], object], decode: Callable[[Any], T]
) -> None:
    """Teach trees one more type (exactly that type, not its subclasses).

    Parameters
    ----------
    name
        What stands in the snapshot; must stay the same for as long as snapshots shall be readable.
    type_
        The type.
    encode
        Gives an encodable value for an instance.
    decode
        Gives the instance back.

    Raises
    ------
    UsageError
        If name or type are taken by another codec.
    """
    taken = [n for n, codec in _codecs.items() if (n == name) != (codec.type_ is type_)]
    if taken:
        raise UsageError(f"the codec {name!r} for {type_.__name__} collides with {taken[0]!r}", "rename it")
    _codecs[name] = _Codec(type_, encode, decode)


def encode(value: object, *, path: str = "") -> Tree:
    """Encode ``value``.

    Parameters
    ----------
    value
        The value; see docs/snapshot-format.md for the types.
    path
        Where the value is, for errors.

    Raises
    ------
    UsageError
        For a value of another type, or nested too deeply, or within itself; names the path.
    """
    return Tree(msgspec.json.encode(_encode(value, path, 0)))


def _encode(value: Any, path: str, depth: int) -> object:
    kind = type(value)
    if stands_for_itself(value):
        return value
    if kind is str:
        return _text(value, path)
    if kind in _COLLECTIONS:
        depth = _below(path, depth)
        items = [_encode(item, _join(path, number), depth) for number, item in enumerate(value)]
        return [kind.__name__, *(sorted(items, key=repr) if kind in (set, frozenset) else items)]
    if kind in _MAPPINGS:
        depth = _below(path, depth)
        return [
            _MAPPINGS[kind],
            *(
                [_encode(key, f"{_join(path, key)} (the key)", depth), _encode(item, _join(path, key), depth)]
                for key, item in value.items()
            ),
        ]
    for name, codec in _codecs.items():
        if codec.type_ is kind:
            return ["codec", name, _encode(codec.encode(value), path, _below(path, depth))]
    leaf = encode_leaf(value, path)
    if leaf is not None:
        return leaf
    raise UsageError(
        f"{named(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved",
        "give plain values, or teach its type with gpuslice.checkpoint.format.tree.register_codec",
    )


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{named(path)} is not valid Unicode text", "save it as bytes") from None
    return value


def _below(path: str, depth: int) -> int:
    """The depth of what is in a value at ``depth``."""
    if depth >= DEPTH_LIMIT:
        raise UsageError(f"{named(path)} is nested more than {DEPTH_LIMIT} deep", "flatten it")
    return depth + 1


def _join(path: str, key: object) -> str:
    part = key if isinstance(key, str) else repr(key)
    return f"{path}.{part}" if path else part


def decode(tree: Tree) -> Any:
    """Give the value back.

    Raises
    ------
    CorruptSnapshotError
        If the bytes are not what `encode` writes.
    RefusedSnapshotError
        If they name a codec that is not registered here.
    """
    try:
        value = msgspec.json.decode(tree.data)
        canonical = msgspec.json.encode(value) == tree.data
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CorruptSnapshotError(f"the tree is not JSON: {error}") from error
    if not canonical:
        raise CorruptSnapshotError("the tree is not canonical JSON")
    return _decode(value, 0)


def _decode(value: Any, depth: int) -> Any:
    if value is None or type(value) in (bool, str, int):
        return value
    if not isinstance(value, list) or not value or depth > DEPTH_LIMIT + 1:
        raise CorruptSnapshotError(f"the tree has no tagged value in {str(value)[:40]}")
    tag, *rest = value
    if not isinstance(tag, str) or tag not in _BUILDERS:
        raise CorruptSnapshotError(f"the tree has the unknown tag {str(tag)[:40]!r}")
    try:
        if tag == "codec":
            return _decode_by_codec(*rest, depth=depth + 1)
        if tag in LEAVES:
            return _BUILDERS[tag](*rest)
        part = _pair if tag in _MAPPINGS.values() else _decode
        return _BUILDERS[tag](part(item, depth + 1) for item in rest)
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        raise CorruptSnapshotError(f"the tree has a malformed {tag}: {error}") from error


def _pair(pair: Any, depth: int) -> tuple[Any, Any]:
    if type(pair) is not list or len(pair) != 2:
        raise CorruptSnapshotError("the tree has a malformed pair")
    return _decode(pair[0], depth), _decode(pair[1], depth)


def _decode_by_codec(name: object, inner: object, *, depth: int) -> object:
    if not isinstance(name, str):
        raise TypeError("its name is no text")
    if name not in _codecs:
        raise RefusedSnapshotError(
            f"the snapshot needs the codec {name!r}, which is not registered",
            "call gpuslice.checkpoint.format.tree.register_codec before restoring",
        )
    return _codecs[name].decode(_decode(inner, depth))


_COLLECTIONS = (list, tuple, set, frozenset)
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "odict"}
_BUILDERS: dict[str, Callable[..., object]] = {
    **{kind.__name__: kind for kind in _COLLECTIONS},
    **{tag: kind for kind, tag in _MAPPINGS.items()},
    **LEAVES,
    "codec": _decode_by_codec,
}
