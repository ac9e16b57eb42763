"""Any rank of a gang is killed, at any moment: the gang ends as an undisturbed one (gang.py).

With ``GPUSLICE_KILLS=all`` these are all moments of ``deadly_moments.py``, as by ``./x soak kills``; without
it one of each kind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuslice.config import Settings
from gpuslice.launch import command
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle import restarts
from gpuslice.sched_core.lifecycle.events import Held, Released
from gpuslice.sched_core.live.scheduler import Scheduler
from gpuslice.sched_core.policies.fifo import Fifo
from gpuslice.types import DeviceName

from ..gpuslice import gang
from ..gpuslice.deadly_moments import RESTARTING, RESUMING, SUSPENDING, order
from ..patience import PATIENCE_S

SCRIPT = str(Path(gang.__file__))
EPOCHS = "20"
NAME = "g"
ALL = os.environ.get("GPUSLICE_KILLS") == "all"
RANKS = 4 if ALL else 3
KINDS = "ddp fsdp tensor_parallel plain" if ALL else "ddp fsdp plain"
#: Ranks that are killed as they train, and the moments at which one is killed. Before each of ``RESTARTS``
#: another rank is killed as it trains, so that there is something to agree on.
TRAINING, SUSPENDS, RESUMES, RESTARTS = (
    ((0, 1), SUSPENDING, RESUMING, RESTARTING) if ALL else ((1,), ("published",), ("back",), ("agreed",))
)

pytestmark = [pytest.mark.slow, pytest.mark.gangs]


def digests(directory: Path) -> dict[str, dict[str, str]]:
    found = {file.name: json.loads(file.read_text()) for file in directory.glob("digests.*")}
    for of_rank in found.values():
        del of_rank["done"]
    return found


class Gang:
    """A gang under a scheduler, at whose ranks one can aim."""

    def __init__(self, scheduler: Scheduler, core: Core, directory: Path) -> None:
        self._scheduler, self._core, self._directory = scheduler, core, directory
        self.went_on_from: list[int] = []

    @property
    def job(self):  # type: ignore[no-untyped-def]
        return self._core.jobs[NAME]

    @property
    def ended(self) -> bool:
        """Whether it has, for good."""
        return bool(self.job.state.ended and self.job.processes_gone)

    def until(self, holds: Callable[[], bool]) -> None:
        """Run the scheduler until it is so; the job does not end before."""
        err = self._scheduler.local.processes.log(NAME, "err")
        over = self._scheduler.run(lambda: self.ended or holds(), timeout_s=PATIENCE_S)
        assert over, (list(self.job.history), err.read_text())
        assert not self.ended, err.read_text()

    def train(self, attempt: int) -> None:
        """Until that attempt has passed some boundaries, and has a checkpoint of its own."""
        self.until(lambda: self._at() > 0 and self.job.attempt == attempt)
        here = self._at()
        self.went_on_from.append(here)
        self.until(lambda: self._at() > here + 3)

    def _at(self) -> int:
        """The boundary that all ranks have passed; 0 if some do not train."""
        return min(rank.boundary for rank in self.job.ranks) if self.job.state is JobState.RUNNING else 0

    def hold(self) -> None:
        self._scheduler.apply_request(Held(NAME))

    def release(self) -> None:
        self._scheduler.apply_request(Released(NAME))

    def kill(self, rank: int) -> None:
        os.kill(self.job.ranks[rank].pid, signal.SIGKILL)

    def order(self, moment: str, rank: int) -> None:
        order(self._directory, moment, rank)

    def dead(self, attempts: int) -> None:
        """Until so many attempts have failed."""
        self.until(lambda: self.job.attempt == attempts)


@pytest.fixture
def ramdisk() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gpuslice-test-", dir="/dev/shm") as directory:
        yield directory


def test_ranks_killed_at_every_kind_of_moment(
    tmp_path: Path, ramdisk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they train, suspend, resume, and as they agree where to go on."""
    monkeypatch.setattr(restarts, "BACK_OFF_S", 1e-3)
    undisturbed, ours, fast = (tmp_path / name for name in ("undisturbed", "ours", "fast"))
    undisturbed.mkdir()
    ours.mkdir()
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GANG_KINDS": KINDS}
    words = (str(RANKS), EPOCHS, "0", "0")
    alone = subprocess.Popen([sys.executable, SCRIPT, str(undisturbed), *words], env=environ)
    core = Core([DeviceName("cpu", slot) for slot in range(RANKS)], Fifo())
    settings = Settings(device="cpu:0", ramdisk_dir=ramdisk, cpu_slots=RANKS, checkpoint_every=2)
    variables = command.environment(settings, {**environ, "GANG_SLOW_UNTIL": str(fast)})
    argv = command.command_line([SCRIPT, str(ours), *words])
    with Scheduler(core, tmp_path / "s", observer=lambda event, now, commands: core.check()) as scheduler:
        scheduler.submit(
            JobSpec(id=NAME, submit_s=0.0, devices=RANKS, max_restarts=100),
            Program(tuple(argv), "/", variables),
        )
        gang = Gang(scheduler, core, ours)
        attempts = kill_all(gang)
        gang.train(attempts)
        fast.touch()
        assert scheduler.run(lambda: gang.ended, timeout_s=PATIENCE_S)
        told = scheduler.local.processes.log(NAME, "err").read_text()
        assert (gang.job.state, gang.job.failures) == (JobState.SUCCEEDED, attempts), told
    assert alone.wait(PATIENCE_S) == 0
    assert digests(ours) == digests(undisturbed)
    assert gang.went_on_from == sorted(gang.went_on_from), "it lost a snapshot"


def kill_all(gang: Gang) -> int:
    """Kill ranks as they train and at moments of a switch; return how many attempts that took."""
    attempts = 0
    for rank in TRAINING:
        gang.train(attempts)
        gang.kill(rank)
        attempts += 1
        gang.dead(attempts)
    for number, moment in enumerate((*SUSPENDS, *RESUMES), start=2):
        gang.train(attempts)
        if moment in RESUMES:
            gang.hold()
            gang.until(lambda: gang.job.state is JobState.SUSPENDED)
        gang.order(moment, number % RANKS)
        (gang.release if moment in RESUMES else gang.hold)()
        attempts += 1
        gang.dead(attempts)
        if gang.job.held:
            gang.release()
    for number, moment in enumerate(RESTARTS):
        gang.train(attempts)
        gang.order(moment, number + 1)
        gang.kill(RANKS - 1 - number)
        attempts += 2
        gang.dead(attempts)
    return attempts
