"""What other processes take of a job's memory limit is counted, and they can take no more than is left."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from gpuslice.limits import worker_memory
from gpuslice.limits.worker_memory import Watch, WorkerMemory, bounded, private_bytes

from ...patience import PATIENCE_S

MIB = 1 << 20
#: Takes as many MiB as each line says, and says whether it got them.
TAKES = """
import sys
kept = []
print("begun", flush=True)
for line in sys.stdin:
    try:
        kept.append(bytearray(int(line) << 20))
        print("taken", flush=True)
    except MemoryError:
        print("refused", flush=True)
"""


class Taker:
    """A process below another one, which is below this one."""

    def __init__(self) -> None:
        shell = f"'{sys.executable}' -c '{TAKES}'; true"  # `true` keeps the shell in between
        self.process = subprocess.Popen(
            ["sh", "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.answer() == "begun"

    def take(self, mib: int) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{mib}\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def taker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Taker]:
    """The only one below this process that counts: other tests' fixtures may have started some, too."""
    one, below = Taker(), worker_memory._below

    def ours(pid: int) -> list[int]:
        return below(pid) if pid != os.getpid() else [one.process.pid, *below(one.process.pid)]

    monkeypatch.setattr(worker_memory, "_below", ours)
    yield one
    one.end()


def test_what_it_takes_counts_until_it_ends(taker: Taker) -> None:
    own_bytes = private_bytes(os.getpid())
    memory = WorkerMemory(0)
    assert memory.taken_bytes(own_bytes) == 0  # what it had when it was found is not taken
    assert taker.take(64) == "taken"
    assert 64 * MIB <= memory.taken_bytes(own_bytes) < 66 * MIB
    taker.end()
    assert memory.taken_bytes(own_bytes) == 0


def test_it_gets_what_room_there_is_and_no_more(taker: Taker) -> None:
    memory = WorkerMemory(0)
    memory.taken_bytes(private_bytes(os.getpid()))
    assert memory.allow(100 * MIB) == 2
    assert [taker.take(mib) for mib in (64, 64)] == ["taken", "refused"]
    memory.taken_bytes(private_bytes(os.getpid()))
    memory.allow(100 * MIB)
    assert [taker.take(mib) for mib in (64, 64)] == ["taken", "refused"]


def test_who_runs_a_program_of_its_own_may_import_torch_first(taker: Taker) -> None:
    own_bytes = private_bytes(os.getpid())
    has_bytes = 64 * MIB + own_bytes
    memory = WorkerMemory(has_bytes)
    memory.taken_bytes(has_bytes)
    assert taker.take(48) == "taken"
    assert memory.taken_bytes(has_bytes) == 0


def test_it_goes_on_after_it_had_no_memory_itself() -> None:
    failed, again = threading.Event(), threading.Event()

    def share() -> int:
        if not failed.is_set():
            failed.set()
            raise MemoryError
        again.set()
        return 1

    watch = Watch(share)
    watch.start()
    assert again.wait(PATIENCE_S)
    watch.end()


def run_a_program() -> None:
    subprocess.run(["true"], check=True)


def start_a_worker(method: str) -> None:
    worker = multiprocessing.get_context(method).Process(target=os.getpid)  # type: ignore[attr-defined]
    worker.start()
    worker.join(PATIENCE_S)


@pytest.mark.parametrize(
    "start",
    [run_a_program, partial(start_a_worker, "fork"), partial(start_a_worker, "spawn")],
    ids=["program", "fork", "spawn"],
)
def test_it_sleeps_until_a_process_is_started(
    monkeypatch: pytest.MonkeyPatch, start: Callable[[], None]
) -> None:
    looked, asleep = threading.Semaphore(0), threading.Event()

    class Awake(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is None, "there is nobody to look at"
            asleep.set()
            return super().wait(timeout)

    def share() -> int:
        looked.release()
        return 0

    # The wrappers that the watch makes go with the test.
    monkeypatch.setattr(subprocess.Popen, "__init__", subprocess.Popen.__init__)
    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", multiprocessing.util.spawnv_passfds)
    watch = Watch(share)
    monkeypatch.setattr(watch, "_awake", Awake())
    watch.start()
    assert looked.acquire(timeout=PATIENCE_S)
    assert asleep.wait(PATIENCE_S)
    start()
    assert looked.acquire(timeout=PATIENCE_S)
    watch.end()


def test_a_soft_limit_stays_within_the_others() -> None:
    assert bounded(5, -1, 7) == 5
    assert bounded(9, -1, 7) == 7
    assert bounded(9, -1, -1) == 9
