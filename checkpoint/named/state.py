"""Named state of an attached job: convert live objects to tree and tensors, and back.

``describe`` turns objects under names into what a snapshot stores; ``check`` compares a snapshot with live
objects without changing anything; ``Restoration.apply`` loads. docs/training-scripts.md says which objects
can be named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpuslice.checkpoint.discover import heap
from gpuslice.checkpoint.format import nodes
from gpuslice.checkpoint.format.nodes import AnyTensorNode, Node
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.errors import RefusedSnapshotError, UsageError

from .describe import OWN_PREFIX as OWN_PREFIX
from .describe import Describer
from .load import Checker, Load
from .param_groups import tensors_by_name
from .snapshot_tensors import Maker, Source

#: The runtime's own entries that older snapshots lack. Tensors of its other entries stay on the host.
LIKE_NAMED = ("gpuslice.attributes", "gpuslice.pass", "gpuslice.loader")


@dataclass(frozen=True)
class NamedState:
    """The description, for a snapshot, of the objects that a script has named.

    Attributes
    ----------
    tree
        For the snapshot; refers to tensors by index.
    tensors
        (path, strided tensor on whatever device), in the order of the indices.
    unsaved
        What could not be saved, and why. If there is any, no other process can continue from it.
    """

    tree: bytes
    tensors: tuple[tuple[str, torch.Tensor], ...]
    unsaved: tuple[str, ...] = ()


def describe(named: Mapping[str, object]) -> NamedState:
    """Return the description of the objects. Nothing is copied.

    Raises
    ------
    UsageError
        If one cannot be saved, or an optimizer steps parameters that no other object holds.
    """
    describer = Describer({id(tensor): name for name, tensor in tensors_by_name(named).items()})
    described = {name: describer.node(value, name) for name, value in named.items()}
    for parameter, path in describer.optimized.items():
        if parameter not in describer.covered:
            raise UsageError(f"{path} steps parameters that nothing else holds", "attach their module, too")
    return NamedState(
        nodes.encode(described), tuple(describer.tensors), tuple(dict.fromkeys(describer.unsaved))
    )


@dataclass(frozen=True)
class Restoration:
    """A snapshot that fits live objects, ready to be loaded into them. The snapshot must stay open."""

    _source: Source
    _loads: Mapping[str, Load]
    _devices: Mapping[str, torch.device]

    @property
    def gpus(self) -> dict[int, int]:
        """Present number of each of the snapshot's GPUs, by its number there, as live tensors have shown."""
        pairs = [(torch.device(recorded), live) for recorded, live in self._devices.items()]
        return {
            there.index or 0: here.index or 0 for there, here in pairs if there.type == here.type == "cuda"
        }

    def value(self, name: str) -> Any:
        """Return the value that `apply` will return for a name without a live object. Changes nothing."""
        return self._loads[name](Maker(self._source, {}))

    def apply(self) -> dict[str, Any]:
        """Load everything, and return the objects by name; new objects for plain values."""
        moving, staying = Maker(self._source, self._devices), Maker(self._source, {})
        with heap.uncollected():
            return {name: load(staying if _is_own(name) else moving) for name, load in self._loads.items()}


@heap.uncollected()
def check(
    snapshot: SnapshotFile,
    named: Mapping[str, object],
    *,
    entire: bool = False,
    loose: Collection[str] = (),
    verify: bool = True,
) -> Restoration:
    """Compare a snapshot with the live objects to load. Return the restoration; changes nothing.

    Parameters
    ----------
    entire
        True to refuse a snapshot that holds other names of the script.
    loose
        Names of values that need not fit the live ones. New ones are made then.
    verify
        True to compare the tensors' bytes with their checksums. Those of random states always are.

    Raises
    ------
    RefusedSnapshotError
        If an object has no counterpart, or another kind, shape, dtype or names; names the entry.
    CorruptSnapshotError
        If bytes that are needed are damaged.
    """
    source = Source(snapshot, verify=verify)
    checker, own = Checker(source), Checker(source.strict)
    saved = nodes.decode(snapshot.tree)
    checker.tensors = tensors_by_name(named)
    checker.with_attributes = LIKE_NAMED[0] in saved
    left_out = {name for name in saved.keys() - named.keys() if not name.startswith(OWN_PREFIX)}
    if entire and left_out:
        raise RefusedSnapshotError(
            f"{snapshot.path} holds {min(left_out)!r}, which is not attached", "attach it under that name"
        )
    loads = {
        name: _compare(own if _is_own(name) else checker, snapshot, saved, name, live, name in loose)
        for name, live in named.items()
        if name in saved or name not in LIKE_NAMED
    }
    for one in (checker, own):
        one.finish()
    return Restoration(source, loads, checker.devices)


def plain_value(snapshot: SnapshotFile, name: str) -> Any:
    """Return the plain value that a snapshot holds under a name; None if it holds none."""
    node = nodes.decode(snapshot.tree).get(name)
    return node.value() if isinstance(node, nodes.ValueNode) else None


def _is_own(name: str) -> bool:
    return name.startswith(OWN_PREFIX) and name not in LIKE_NAMED


def _compare(
    checker: Checker,
    snapshot: SnapshotFile,
    saved: Mapping[str, Node],
    name: str,
    live: object,
    loose: bool,
) -> Load:
    if name not in saved:
        known = ", ".join(sorted(name for name in saved if not name.startswith(OWN_PREFIX)))
        raise RefusedSnapshotError(f"{snapshot.path} holds no {name!r}", f"it holds {known or 'nothing'}")
    node = saved[name]
    if loose or not isinstance(live, torch.Tensor):
        return checker.check(node, live, name)
    if not isinstance(node, AnyTensorNode):
        raise RefusedSnapshotError(f"{name} is a tensor here, but was not when saved")
    return checker.named_tensor(node, live, name)
