"""A GPU's lanes on the host, for ``GpuCopy``: what is queued happens when somebody waits for it.

The kernels are those of ``kernels/*.cu``, compiled by the system's C++ compiler. Whoever uses bytes before
waiting for them finds out, because they have not moved yet; whoever reuses a buffer out of order, too.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from gpuslice.kernels.cuda import kernels
from gpuslice.kernels.cuda.kernels import Pieces, combine, shape_of, table

from ..patience import PATIENCE_S
from .build import FAKES


def build_kernels(directory: Path) -> ctypes.CDLL:
    """The kernels as a library for the host; skips the test where there is no C++ compiler."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here to build the kernels for the host")
    library = directory / "kernels.so"
    command = [
        compiler,
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-fPIC",
        "-shared",
    ]
    command += [f"-I{kernels.SOURCES[0].parent}", f"-I{FAKES}", str(FAKES / "kernels_on_host.cpp")]
    done = subprocess.run(
        [*command, "-o", str(library)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


class HostLane:
    """A queue that is worked off by whoever waits."""

    def __init__(self, engine: HostEngine) -> None:
        self._engine = engine
        self._queue: deque[Callable[[], object]] = deque()
        self._working = threading.RLock()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._engine.copied.append(target.numel())
        self._queue.append(lambda: target.copy_(source))
        self._engine.on_copy()

    def staging(self, nbytes: int) -> torch.Tensor | None:
        if nbytes > self._engine.free_bytes:
            return None
        return torch.zeros(nbytes, dtype=torch.uint8)

    def launch(self, name: str, pieces: Pieces, target: torch.Tensor) -> None:
        self._queue.append(lambda: self._launch(f"host_{name}", pieces, target.data_ptr()))

    def checksums(self, pieces: Pieces) -> list[int] | None:
        if not self._engine.free_bytes:
            return None
        self.wait()
        words = np.zeros(2 * len(pieces), dtype=np.uint64)
        self._launch("host_checksum", pieces, words.ctypes.data)
        return combine(words)

    def follow(self, other: HostLane) -> None:
        self._queue.append(other.wait)

    def record_event(self) -> Callable[[], None]:
        over = threading.Event()
        self._queue.append(over.set)

        def wait() -> None:
            with self._working:
                while not over.is_set():
                    self._queue.popleft()()

        return wait

    def wait(self) -> None:
        self._engine.waits += 1
        if self._engine.interrupts:
            raise self._engine.interrupts.pop()
        with self._working:
            while self._queue:
                self._queue.popleft()()

    def _launch(self, name: str, pieces: Pieces, target: int) -> None:
        rows = table(pieces)
        (blocks, at_a_time), _ = shape_of(name.removeprefix("host_"), pieces)
        launch = getattr(self._engine.kernels, name)
        pointers = (ctypes.c_void_p(rows.ctypes.data), len(pieces), ctypes.c_void_p(target))
        launch(
            min(blocks, 4), at_a_time, 16, *pointers
        )  # any grid gives the same bytes; a small one is quick here
        self._engine.launched.append(name)


class HostEngine:
    """Lanes over the host's own memory.

    Attributes
    ----------
    missing
        Why there are no kernels.
    free_bytes
        What a staging buffer may take at most; 0 also means: none for checksums.
    interrupts
        Raised by the next waits for a lane, one each.
    copied, launched, waits
        What was done.
    on_copy
        Called by whoever has just queued a copy.
    """

    def __init__(self, kernels: ctypes.CDLL, lanes: int = 2) -> None:
        self.kernels = kernels
        self.missing = ""
        self.free_bytes = 1 << 40
        self.interrupts: list[BaseException] = []
        self.copied: list[int] = []
        self.launched: list[str] = []
        self.waits = 0
        self.on_copy: Callable[[], object] = lambda: None
        self._count = lanes

    def lanes(self) -> Sequence[HostLane]:
        return [HostLane(self) for _ in range(self._count)]

    def kernels_missing(self) -> str:
        return self.missing
