"""Export a snapshot as a checkpoint of torch.distributed.checkpoint: every tensor by its name."""

from __future__ import annotations

import warnings
from inspect import signature
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from gpuslice.checkpoint.format.export_safetensors import named_tensors, written_beside
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.errors import UsageError

from .snapshot_tensors import Source

#: The option that tells torch that no other process takes part. Before 2.7 torch has none, and checks if
#: there is a process group.
ALONE: dict[str, Any] = {"no_dist": True} if "no_dist" in signature(save).parameters else {}


def export_dcp(snapshot: SnapshotFile, path: Path) -> int:
    """Write the tensors of ``snapshot`` as the directory ``path``, and return their number.

    Storages are checked on the way. Tied tensors are written once each, as torch does; a second tensor of the
    same name gets ``#2`` added. Torch itself writes the files. Its ``.metadata`` is a pickle, which gpuslice
    never reads.

    Raises
    ------
    CorruptSnapshotError
        If a storage is damaged; nothing was written.
    UsageError
        If ``path`` exists.
    EnvironmentUnusableError
        If it cannot be written.
    """
    if path.exists():
        raise UsageError(f"{path} exists already", "choose another name, or remove it")
    source = Source(snapshot)
    tensors = {name: source.tensor(spec) for name, spec in named_tensors(snapshot)}
    with written_beside(path) as partial, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is only one process
        partial.mkdir()
        try:
            save(tensors, storage_writer=FileSystemWriter(partial), **ALONE)
        except CheckpointException as error:
            raise OSError(_reason(error)) from error
    return len(tensors)


def _reason(error: CheckpointException) -> str:
    """Return the operating system's reason for torch's failure to write, if it names one."""
    failure, _ = next(iter(error.failures.values()))
    cause: BaseException | None = failure
    while cause is not None and not (isinstance(cause, OSError) and cause.strerror):
        cause = cause.__cause__ or cause.__context__
    return str(failure) if cause is None else str(cause.strerror)
