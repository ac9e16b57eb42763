"""The process to which a job migrates: builds the job's objects, then restores what it is told to.

Started as ``python -m benchmarks.migration_latency.target STATE DIRECTORY``, with the directory of the job's
store. It says ``warm`` when it is ready, and answers every path on its standard input by ``here`` when the
training could go on. A path on the command line, instead of the directory, is restored at once. ``check``
answers by a digest of all that was restored.
"""

from __future__ import annotations

import sys
from pathlib import Path

import xxhash

from benchmarks.states import STATES, State
from gpuslice.checkpoint.format.reader import open_snapshot
from gpuslice.checkpoint.named.state import check


def restore(state: State, path: Path) -> None:
    """What ``gpuslice.attach`` does."""
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
    name, path = sys.argv[1], Path(sys.argv[2])
    State.train = _nothing  # type: ignore[method-assign]
    state = STATES[name]()
    if path.is_file():
        restore(state, path)
        print("here", flush=True)
        return
    print("warm", flush=True)
    for line in sys.stdin:
        if line.strip() == "check":
            print(digest(state), flush=True)
        else:
            restore(state, Path(line.strip()))
            print("here", flush=True)


if __name__ == "__main__":
    main()
