"""Digests of whole states, devices that fail on command, and what a parked job's neighbours do to it."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType

import numpy as np
import torch

from gpuslice.checkpoint.discover.tensor_parts import strided_parts
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.gate import NoGate
from gpuslice.kernels.host.device import CpuDevice
from gpuslice.kernels.transfer import Checksums, Inspector, Pairs, Transfer
from gpuslice.types import DeviceName

_MODULE_PARTS = ("_parameters", "_buffers", "_modules", "training")


class Digest:
    """SHA-256 over everything that can be reached from objects, order and ties included.

    Reading must leave no trace: nothing here calls ``.numpy()``, which would pin a storage's memory.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._alive: list[object] = []

    def text(self) -> str:
        return self._hash.hexdigest()

    def add(self, value: object) -> None:
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
            self._note(repr(value))
        elif id(value) in self._seen:
            self._note(f"again {self._seen[id(value)]}")
        else:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
            self._note(type(value).__qualname__)
            self._add_object(value)

    def _add_object(self, value: object) -> None:
        if isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, torch.UntypedStorage):
            self._note(_raw(torch.empty(0, dtype=torch.uint8, device=value.device).set_(value)))
        elif isinstance(value, np.ndarray):
            self._note(repr((value.dtype, value.shape)), value.tobytes())
        elif isinstance(value, torch.Generator):
            self._note(_raw(value.get_state()))
        elif isinstance(value, (np.random.Generator, np.random.RandomState, random.Random)):
            self.add(_random_state(value))
        elif isinstance(value, torch.nn.Module):
            self._add_many([getattr(value, part) for part in _MODULE_PARTS])
            self.add({key: item for key, item in vars(value).items() if isinstance(item, torch.Tensor)})
        elif isinstance(value, torch.optim.Optimizer):
            slots = [dict(slots) if isinstance(slots, dict) else slots for slots in value.state.values()]
            self._add_many([slots, [dict(group) for group in value.param_groups]])
        elif isinstance(value, Mapping):
            self._add_many([*value.keys(), *value.values()])
        elif isinstance(value, FunctionType):
            self._add_many([cell.cell_contents for cell in value.__closure__ or ()])
        elif dataclasses.is_dataclass(value):
            self._add_many([getattr(value, field.name) for field in dataclasses.fields(value)])
        elif isinstance(value, (Sequence, set, frozenset)):
            self._add_many(list(value))
        elif hasattr(value, "state_dict"):
            self.add(value.state_dict())
        else:
            self._note(repr(sorted(getattr(value, "__dict__", {}))))

    def _add_many(self, values: Sequence[object]) -> None:
        self._note(str(len(values)))
        if set(map(type, values)) == {int}:
            self._note(repr(values))  # the state of a generator has hundreds
            return
        for value in values:
            self.add(value)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            for part in strided_parts(tensor):
                self._note(repr((part.dtype, part.shape, part.stride(), part.storage_offset())), _raw(part))
        if tensor.is_leaf:
            self.add(tensor.grad)

    def _note(self, *texts: str | bytes) -> None:
        for text in texts:
            data = text.encode() if isinstance(text, str) else text
            self._hash.update(len(data).to_bytes(8, "little") + data)


def digest(*values: object) -> str:
    """One digest of several objects."""
    result = Digest()
    for value in values:
        result.add(value)
    return result.text()


def _raw(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach()
    if plain.is_quantized:
        plain = plain.int_repr()
    copied = plain.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return bytes(copied.reshape(-1).view(torch.uint8).cpu().numpy())


def _random_state(generator: np.random.Generator | np.random.RandomState | random.Random) -> object:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state(legacy=True)


def seed(number: int) -> None:
    """Put every generator that the process shares at a known place."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def disturb() -> None:
    """What neighbours do while a job is parked: draw random numbers, write over the memory it gave back."""
    for _ in range(3):
        random.random()
        np.random.random()
        torch.rand(17)
    junk = [torch.full((nbytes,), 0xA5, dtype=torch.uint8) for nbytes in [64, 512, 4096, 70_000] * 8]
    junk.append(torch.full((4 << 20,), 0xA5, dtype=torch.uint8))
    del junk


def flip_a_bit(path: Path, place: int) -> None:
    """Change the lowest bit of the byte at ``place``; a second time brings it back."""
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def flip_a_byte(snapshot: SnapshotFile, label: str) -> None:
    """Change the file in the middle of every storage that is called so."""
    content = snapshot.path.read_bytes()
    for sid, storage in enumerate(snapshot.storages):
        if storage.label == label:
            needle = bytes(snapshot.view(sid))
            flip_a_bit(snapshot.path, content.index(needle) + len(needle) // 2)


class FaultyDevice(CpuDevice):
    """The host, with failures on command.

    Parameters
    ----------
    failures
        Method name -> how many of its first calls fail half-way, with ``Broken``.
    """

    def __init__(self, **failures: int) -> None:
        super().__init__(DeviceName("cpu", None))
        self.failures = failures
        self.calls: list[str] = []

    def _step(self, name: str) -> bool:
        """Note a call; whether it has to fail."""
        self.calls.append(name)
        self.failures[name] = self.failures.get(name, 0) - 1
        return self.failures[name] >= 0

    def synchronize(self) -> None:
        if self._step("synchronize"):
            raise Broken("synchronize")

    def copy_out(
        self,
        pairs: Pairs,
        arena: memoryview,
        inspect: Inspector | None = None,
        checksums: Checksums | None = None,
    ) -> Transfer:
        broken = self._step("copy_out")
        transfer = super().copy_out(pairs[: len(pairs) // 2] if broken else pairs, arena, inspect, checksums)
        if broken:
            raise Broken("copy_out")
        return transfer

    def copy_in(
        self,
        pairs: Pairs,
        arena: memoryview,
        inspect: Inspector | None = None,
        checksums: Checksums | None = None,
    ) -> Transfer:
        broken = self._step("copy_in")
        transfer = super().copy_in(pairs[: len(pairs) // 2] if broken else pairs, arena, inspect, checksums)
        if broken:
            raise Broken("copy_in")
        return transfer

    def free(self, storages: Sequence[torch.UntypedStorage]) -> None:
        broken = self._step("free")
        super().free(storages[: len(storages) // 2] if broken else storages)
        if broken:
            raise Broken("free")

    def release_caches(self, *, workspaces: bool = True) -> None:
        if self._step("release_caches"):
            raise Broken("release_caches")
        super().release_caches(workspaces=workspaces)

    def reserve(self, pairs: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
        if self._step("reserve"):
            half = len(pairs) // 2
            super().reserve([*pairs[:half], (OutOfMemory(0), 1), *pairs[half:]])
        else:
            super().reserve(pairs)


class Broken(Exception):
    """A failure that was ordered."""


class OutOfMemory(torch.UntypedStorage):
    """A storage for which there is never memory."""

    def resize_(self, size: int) -> None:
        if size:
            raise RuntimeError("can't allocate memory")


class Job:
    """Something with state: torch's memory, NumPy's, views, gradients."""

    def __init__(self) -> None:
        seed(3)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(100, 200), torch.nn.Dropout(), torch.nn.Linear(200, 5)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.array = np.random.default_rng(1).random(100_000)
        self.tensor = torch.from_numpy(self.array)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 100)).square().mean().backward()
        self.optimizer.step()
        self.tensor += 1

    def digest(self) -> str:
        return digest(self.model, self.optimizer, self.array, self.tensor, torch.get_rng_state())


class SpyGate(NoGate):
    """Counts."""

    def __init__(self, alone: bool = True) -> None:
        self.closed = 0
        self.is_shut = False
        self._alone = alone

    @property
    def alone(self) -> bool:
        return self._alone

    def close(self) -> None:
        self.closed += 1

    def open(self) -> None:
        self.closed = 0

    def shut(self) -> None:
        self.is_shut = True
