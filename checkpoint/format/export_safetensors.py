"""Export a snapshot as a plain safetensors file: every tensor by its name, row-major, without padding."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gpuslice.errors import EnvironmentUnusableError, UsageError

from .dtypes import DTYPES
from .layout import TensorSpec
from .reader import SnapshotFile
from .safetensors_header import covers


def export_safetensors(snapshot: SnapshotFile, path: Path) -> int:
    """Write the tensors of ``snapshot`` to ``path``, check their storages, and return their number.

    Tied tensors are written once each. A type without a name in safetensors becomes ``U8`` with one more
    dimension, and the file's metadata names the type under ``dtype:<tensor>``. A second tensor of the same
    name gets ``#2`` added.

    Raises
    ------
    CorruptSnapshotError
        If a storage is damaged; ``path`` is as it was before.
    UsageError
        If ``path`` is a directory.
    EnvironmentUnusableError
        If ``path`` cannot be written.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a directory", "name a file in it")
    named = list(named_tensors(snapshot))
    with written_beside(path) as partial, partial.open("xb") as file:
        file.write(_header(named))
        for _, tensor in named:
            _write(file, snapshot, tensor)
        file.flush()
        os.fsync(file.fileno())  # some file systems report a failed write only then
    return len(named)


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes ``path`` when the block ends, and is removed if the block fails.

    Raises
    ------
    EnvironmentUnusableError
        For an ``OSError``.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield partial
        os.replace(partial, path)
    except OSError as error:
        remedy = "choose another place with enough room"
        raise EnvironmentUnusableError(f"cannot write {path}: {error.strerror or error}", remedy) from error
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def named_tensors(snapshot: SnapshotFile) -> Iterator[tuple[str, TensorSpec]]:
    """Yield the tensors under unique names: the second tensor named ``a`` is ``a#2``."""
    counts = {"__metadata__": 1}
    for tensor in snapshot.tensors:
        name = tensor.path
        while name in counts:
            counts[tensor.path] += 1
            name = f"{tensor.path}#{counts[tensor.path]}"
        counts[name] = 1
        yield name, tensor


def _header(named: list[tuple[str, TensorSpec]]) -> bytes:
    metadata = {"format": "pt"}
    entries: dict[str, object] = {"__metadata__": metadata}
    position = 0
    for name, tensor in named:
        dtype = DTYPES[tensor.dtype]
        shape = list(tensor.shape)
        if dtype.safetensors is None:
            shape.append(dtype.nbytes)
            metadata[f"dtype:{name}"] = tensor.dtype
        end = position + math.prod(tensor.shape) * dtype.nbytes
        entries[name] = {
            "dtype": dtype.safetensors or "U8",
            "shape": shape,
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return struct.pack("<Q", len(text)) + text


def _write(file: BinaryIO, snapshot: SnapshotFile, tensor: TensorSpec) -> None:
    data = snapshot.view(tensor.sid)
    if covers(tensor, len(data)):
        file.write(data)
    elif 0 not in tensor.shape:
        nbytes = DTYPES[tensor.dtype].nbytes
        array = np.ndarray(
            tensor.shape,
            np.dtype((np.void, nbytes)),
            data,
            tensor.offset * nbytes,
            tuple(step * nbytes for step in tensor.stride),
        )
        file.write(np.ascontiguousarray(array).data.cast("B"))
