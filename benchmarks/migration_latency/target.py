"""The process to which a job migrates: builds the job's objects, then restores what it is told to.

Started as ``python -m benchmarks.migration_latency.target STATE``. It says ``warm`` when it is ready, and
answers every path on its standard input by ``here`` when the training could go on. A path on the command
line is restored at once. ``check`` answers by a digest of all that was restored.
"""

from __future__ import annotations

import sys
from pathlib import Path

import xxhash

from benchmarks.states import STATES, State
from gpuslice.checkpoint.snapshot import open_snapshot
from gpuslice.checkpoint.state import check


def restore(state: State, path: Path) -> None:
    """What ``gpuslice.restore`` does."""
    with open_snapshot(path) as snapshot:
        check(snapshot, state.named).apply()


def digest(state: State) -> str:
    """Of every byte of the state."""
    hashed = xxhash.xxh3_128()
    for tensor in state.tensors:
        hashed.update(tensor.detach().numpy())
    return hashed.hexdigest()


def _nothing(state: State) -> None:
    """A process that has yet to begin has no optimizer state."""


def main() -> None:
    name, *paths = sys.argv[1:]
    State.train = _nothing  # type: ignore[method-assign]
    state = STATES[name]()
    for path in paths:
        restore(state, Path(path))
    print("here" if paths else "warm", flush=True)
    for line in sys.stdin:
        if line.strip() == "check":
            print(digest(state), flush=True)
        else:
            restore(state, Path(line.strip()))
            print("here", flush=True)


if __name__ == "__main__":
    main()
