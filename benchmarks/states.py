"""The states that the benchmarks of the snapshot engine move, and the copy that nothing can beat.

Sizes are for ``GPUSLICE_BENCH_MIB`` (default 1024) of parameters and Adam moments together.
"""

from __future__ import annotations

import mmap
import os
import resource
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import addressof, c_char, memmove
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

STATE_BYTES = int(os.environ.get("GPUSLICE_BENCH_MIB", "1024")) * 2**20
#: Bytes per ``memmove`` of the limit, and threads.
CHUNK_BYTES = 16 << 20
THREADS = 2


class State:
    """Parameters, an Adam over them, and how training changes them.

    Parameters
    ----------
    sizes
        Elements of each parameter.
    frozen
        Of a base that no optimizer steps.
    """

    def __init__(self, sizes: list[int], frozen: list[int] | None = None) -> None:
        torch.manual_seed(1)
        self.module = torch.nn.ParameterList(torch.randn(size) * 0.02 for size in sizes)
        self.base = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(size), requires_grad=False) for size in frozen or []
        )
        self.optimizer = torch.optim.Adam(self.module.parameters(), foreach=False)
        self.train()

    def train(self) -> None:
        """One step; no gradients are left."""
        for parameter in self.module.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def named(self) -> dict[str, object]:
        return {"model": self.module, "base": self.base, "optimizer": self.optimizer}

    @property
    def tensors(self) -> list[torch.Tensor]:
        moments = [t for slots in self.optimizer.state.values() for t in slots.values()]
        return [*self.module.parameters(), *self.base.parameters(), *moments]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [tensor.nbytes for tensor in self.tensors]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.module.state_dict(),
            "base": self.base.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }


def _gpt() -> State:
    """About 800 tensors: of four parameters one is a matrix of 5.2 MiB, the others vectors."""
    matrices = 66
    size = STATE_BYTES // 12 // matrices
    return State([n for _ in range(matrices) for n in (size, 608, 608, 608)])


def _small() -> State:
    """4,000 small tensors, moments included: 1,000 parameters."""
    return State([STATE_BYTES // 12 // 1000] * 1000)


def _frozen() -> State:
    """90 % of the bytes are a base that does not change, as under LoRA."""
    base = STATE_BYTES * 9 // 10 // 4
    return State([STATE_BYTES // 10 // 12 // 40] * 40, [base // 60] * 60)


STATES: dict[str, Callable[[], State]] = {"adam-800": _gpt, "small-4000": _small, "frozen-base": _frozen}


class Limit:
    """The best copy of buffers of ``sizes``: by threads, between memory of the process and faulted tmpfs.

    Nothing is looked for, described, checked, published, allocated or freed. The memory belongs to no tensor,
    so a suspend that happens meanwhile neither finds it nor takes it away.
    """

    def __init__(
        self, sizes: Sequence[int], directory: Path, *, outward: bool, threads: int = THREADS
    ) -> None:
        with open(directory / "limit", "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, sum(sizes))
            self._mapping = mmap.mmap(file.fileno(), sum(sizes))
        self._outside = c_char.from_buffer(self._mapping)
        self._sizes, self._outward, self._threads = sizes, outward, threads
        # While these live, nothing they are made from can move.
        self._inside = [c_char.from_buffer(bytearray(b"\1") * size) for size in sizes]
        self._share_out(map(addressof, self._inside))

    def take_fresh_memory(self) -> None:
        """Let the next copy go into memory that the process is yet to get, and give back what it had.

        It is one piece behind huge pages, of which the kernel clears each when it is first touched.
        """
        self._inside = []
        piece = mmap.mmap(-1, sum(self._sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        piece.madvise(mmap.MADV_HUGEPAGE)
        self._inside = [c_char.from_buffer(piece)]
        self._share_out(accumulate(self._sizes, initial=addressof(self._inside[0])))

    def give_back(self) -> None:
        """Give the memory back that the last copy went into; the next one needs fresh memory."""
        self._inside, self._shares = [], []

    def _share_out(self, insides: Iterable[int]) -> None:
        """Give each thread its part of the bytes; ``insides`` are the addresses of the process's buffers."""
        self._shares: list[list[tuple[int, int, int]]] = [[] for _ in range(self._threads)]
        done, total = 0, sum(self._sizes)
        for piece in self._pieces(insides):
            self._shares[done * self._threads // total].append(piece)
            done += piece[2]

    def _pieces(self, insides: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        """Target, source and length of every ``memmove``."""
        base = addressof(self._outside)
        for address, size in zip(insides, self._sizes, strict=False):
            for start in range(0, size, CHUNK_BYTES):
                inside, outside = address + start, base + start
                ends = (outside, inside) if self._outward else (inside, outside)
                yield (*ends, min(CHUNK_BYTES, size - start))
            base += size

    def __call__(self) -> None:
        others = [threading.Thread(target=_copy, args=(share,)) for share in self._shares[1:]]
        for thread in others:
            thread.start()
        _copy(self._shares[0])
        for thread in others:
            thread.join()


def _copy(share: list[tuple[int, int, int]]) -> None:
    for copy in share:
        memmove(*copy)


def timed(work: Callable[[], object]) -> float:
    """How long it takes, in seconds."""
    began_s = perf_counter()
    work()
    return perf_counter() - began_s


def page_faults() -> int:
    """Minor page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
