"""Send named state to another process: as a snapshot file without a name that lies in memory.

It is written and read like any other snapshot. So it is compared with the live objects before anything is
changed, and nothing is unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpuslice.checkpoint.files import write_at
from gpuslice.checkpoint.format.checksums import chunk_digests
from gpuslice.checkpoint.format.gsnp import Record
from gpuslice.checkpoint.format.layout import Layout
from gpuslice.checkpoint.format.safetensors_header import Content, header_room
from gpuslice.kernels.host.memory_files import map_file

from .snapshot_tensors import NumberedStorages, tensor_spec
from .state import NamedState


@contextmanager
def memory_file() -> Iterator[int]:
    """Yield the descriptor of a new file in memory. The memory is freed with the last mapping."""
    descriptor = os.memfd_create("gpuslice-state", os.MFD_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def file_bytes(descriptor: int) -> torch.Tensor:
    """Return all of a file as a uint8 tensor of one dimension that shares its memory."""
    nbytes = os.fstat(descriptor).st_size
    return torch.frombuffer(map_file(descriptor, nbytes, writable=True), dtype=torch.uint8)


def write_state(descriptor: int, state: NamedState) -> None:
    """Write a snapshot of a state into an empty file. A storage that several tensors share is written once.

    Raises
    ------
    UsageError
        If a tensor is none that can be described, or what is no tensor is too large.
    """
    numbered = NumberedStorages([], {})
    specs = [
        tensor_spec(path, one, numbered.sid_of(one.untyped_storage(), path)) for path, one in state.tensors
    ]
    layout = Layout(tuple(numbered.specs))
    content = Content.build(layout, header_room(layout), specs)
    os.truncate(descriptor, content.placement.end)
    memory = file_bytes(descriptor)
    for storage, offset in zip(numbered.storages, content.placement.offsets, strict=True):
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        memory[offset : offset + storage.nbytes()].copy_(whole)
    digests = chunk_digests(memory.numpy().data, content.placement.chunks)
    record = Record(generation=1, slot=0, rank=0, payload=content.payload)
    _, header, tail = content.complete(record, state.tree, digests, lambda nbytes: nbytes)
    write_at(descriptor, tail, content.placement.end)
    write_at(descriptor, header, 0)
