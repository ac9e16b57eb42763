"""A rank of a job that migrates: its own state, suspended and resumed when it is told to.

Started as ``python -m benchmarks.migration_latency.source STATE DIRECTORY RANK``. It says the directory of
its store when it is ready. Every line on its standard input is answered by a JSON object: ``train`` by an
empty one, ``suspend`` by the snapshot's path and the stages, ``resume`` by the stages, ``check`` by a digest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.migration_latency.target import digest
from benchmarks.states import STATE_BYTES, STATES, State
from gpuslice.checkpoint.discover.heap import hide_imports
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName


class Rank:
    """One rank's state and switch."""

    def __init__(self, state: State, store: JobStore) -> None:
        self._state, self._store = state, store
        self._switch = Switch(open_device(DeviceName("cpu", None)), store)
        self._boundary = 0

    def train(self) -> dict[str, Any]:
        """Change every tensor; the next snapshot takes the place of the last one, in the same warm slot."""
        with torch.no_grad():
            for tensor in self._state.tensors:  # a step of the optimizer would take room for gradients
                tensor.mul_(0.999)
        self._store.forget_after(-1)
        return {}

    def suspend(self) -> dict[str, Any]:
        """Leave the device."""
        self._boundary += 1
        record = self._switch.suspend(boundary=self._boundary, named=self._state.named, restartable=True)
        assert self._switch.snapshot is not None
        return {"path": str(self._switch.snapshot.path), "stages": record.suspend_stages_s()}

    def resume(self) -> dict[str, Any]:
        """Come back in this process."""
        return {"stages": self._switch.resume().resume_stages_s()}

    def check(self) -> dict[str, Any]:
        """What the other process must have, too."""
        return {"digest": digest(self._state)}


def main() -> None:
    name, directory, index = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    hide_imports()  # as under `gpuslice run`
    state = STATES[name]()
    torch.manual_seed(index)
    with torch.no_grad():
        for tensor in state.tensors:  # or what is equal, here or on several ranks, would be sent once
            tensor.add_(torch.rand_like(tensor))
    with RamDisk(directory / "ramdisk", 9 * STATE_BYTES).open_store("bench", index) as store:
        rank = Rank(state, store)
        print(store.directory, flush=True)
        for line in sys.stdin:
            print(json.dumps(getattr(rank, line.strip())()), flush=True)


if __name__ == "__main__":
    main()
