"""Named state on its way to another process: packed into one buffer, and what describes it.

What arrives is read like a snapshot, so it is compared with the live objects before anything is changed, and
nothing is unpickled.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import torch

from gpuslice.checkpoint.format.checksums import chunk_digests, fingerprint, pack_digests, unpack_digests
from gpuslice.checkpoint.format.gsnp import Metadata, Record
from gpuslice.checkpoint.format.layout import Layout, StorageSpec, TensorSpec
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.format.safetensors_header import Content
from gpuslice.checkpoint.format.tree import Tree
from gpuslice.errors import CorruptSnapshotError, UsageError

from .snapshot_tensors import tensor_spec
from .state import NamedState

#: What errors call a state that came from another process.
NAME = Path("the state of rank 0")
_FINGERPRINT_BYTES = 16


class Packed:
    """A named state in one buffer of host memory.

    Attributes
    ----------
    header
        What it holds, as plain bytes behind their own checksum, with the buffer's checksums.
    payload
        The storages' bytes: uint8, one dimension.
    """

    def __init__(self, header: bytes, payload: torch.Tensor) -> None:
        self.header = header
        self.payload = payload


class _Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    metadata: bytes
    digests: bytes


def pack(state: NamedState) -> Packed:
    """Copy the tensors' storages, each once however many tensors share it.

    Raises
    ------
    UsageError
        If a tensor is none that can be described.
    """
    sids: dict[int, int] = {}
    storages: list[torch.UntypedStorage] = []
    specs: list[TensorSpec] = []
    for path, tensor in state.tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in sids:
            sids[storage._cdata] = len(storages)
            storages.append(storage)
        specs.append(tensor_spec(path, tensor, sids[storage._cdata]))
    labels = {spec.sid: spec.path for spec in reversed(specs)}
    layout = Layout(
        tuple(
            StorageSpec(sid, storage.nbytes(), str(storage.device), labels[sid])
            for sid, storage in enumerate(storages)
        )
    )
    content = Content.build(layout, 0, specs)
    payload = torch.zeros(content.placement.end, dtype=torch.uint8)
    for storage, offset in zip(storages, content.placement.offsets, strict=True):
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        payload[offset : offset + storage.nbytes()].copy_(whole)
    found = chunk_digests(_bytes(payload), content.placement.chunks)
    digests = pack_digests(np.array(found, np.uint64))
    metadata = Metadata(content.rows, content.tensors, msgspec.Raw(state.tree.data)).encode()
    header = msgspec.msgpack.encode(_Header(metadata, digests))
    return Packed(fingerprint(header) + header, payload)


def payload_bytes(header: bytes) -> int:
    """How long the payload of this header is.

    Raises
    ------
    CorruptSnapshotError
        If that is no header.
    """
    return _content(_decoded(header)).placement.end


def unpack(packed: Packed) -> SnapshotFile:
    """What was packed, as `state.check` reads it; the payload must stay as it is while it is used.

    Raises
    ------
    CorruptSnapshotError
        If header and payload do not belong together.
    """
    header = _decoded(packed.header)
    content = _content(header)
    if content.placement.end != packed.payload.numel():
        raise CorruptSnapshotError(f"{NAME} has {packed.payload.numel()} bytes, not {content.placement.end}")
    metadata = Metadata.decode(header.metadata)
    chunks = content.placement.chunk_total
    if len(header.digests) != 8 * chunks:
        raise CorruptSnapshotError(f"{NAME} has no checksum for each of its chunks")
    record = Record(generation=1, slot=0, rank=0, payload=0, chunks=chunks)
    tree = Tree(bytes(metadata.tree))
    return SnapshotFile(
        NAME, record, content, tree, unpack_digests(header.digests, chunks), _bytes(packed.payload)
    )


def _decoded(header: bytes) -> _Header:
    body = header[_FINGERPRINT_BYTES:]
    if fingerprint(body) != header[:_FINGERPRINT_BYTES]:
        raise CorruptSnapshotError(f"{NAME} has a damaged header")
    return msgspec.msgpack.decode(body, type=_Header)


def _content(header: _Header) -> Content:
    metadata = Metadata.decode(header.metadata)
    try:
        return Content.build(metadata.layout, 0, metadata.tensors)
    except UsageError as error:
        raise CorruptSnapshotError(f"{NAME}: {error.message}") from error


def _bytes(payload: torch.Tensor) -> memoryview:
    return payload.numpy().data
