"""A gang on two nodes, killed when only one of its ranks has the newest checkpoint, goes on from one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.config import Settings
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.lifecycle import restarts

from .test_gangs_on_nodes import Gangs, gangs, processes, servers, undisturbed

__all__ = ["gangs", "servers", "undisturbed"]

EVERY = 4
#: Of each rank.
NODES = ("", "b")

pytestmark = [pytest.mark.slow, pytest.mark.nodes]


class Checkpointed:
    """A gang with a rank on each of two nodes, which takes checkpoints."""

    def __init__(self, gangs: Gangs, hold: Path) -> None:
        self.gangs = gangs
        self._hold = hold
        os.environ["HELD_CHECKPOINTS"] = str(hold)
        try:
            self.job: Gang = gangs.gang(0, 2, checkpoint_every=EVERY, max_restarts=10)
        finally:
            del os.environ["HELD_CHECKPOINTS"]
        self.common = 0

    def boundaries(self, rank: int) -> set[int]:
        node = NODES[rank]
        settings = Settings(ramdisk_dir=str(self.gangs.ramdisk(node)), socket=self.gangs.socket(node))
        return RamDisk.from_settings(settings).boundaries(self.job.id, rank)

    def apart(self, late: int) -> None:
        """Until all stand where their next checkpoint is due, and one has yet to publish its last one."""
        self.gangs.run(lambda: bool(self.boundaries(0) & self.boundaries(1)))
        self._hold.write_text(str(late))
        ahead = 1 - late
        self.gangs.run(lambda: max(self.boundaries(ahead)) > max(self.boundaries(late)))
        due = max(self.boundaries(ahead)) // EVERY * EVERY + EVERY
        self.gangs.run(lambda: all(rank.boundary >= due for rank in self.job.ranks))
        self.common = max(self.boundaries(late))

    def restarts(self, kill: Callable[[], object]) -> None:
        """All that has lost a rank is started again, from the newest checkpoint that both have."""
        kill()
        attempts = self.job.failures + 1
        self.gangs.run(lambda: self.job.failures == attempts)
        self._hold.unlink()
        self.gangs.trains(lambda: self.job.attempt == self.job.relaunches + attempts)
        assert self.gangs.notes("went_on")[-1].details["boundary"] == self.common


def kill_all(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_whichever_rank_is_late_and_whatever_is_killed_it_goes_on_from_what_both_have(
    gangs: Gangs, undisturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "BACK_OFF_S", 1e-3)
    gang = Checkpointed(gangs, tmp_path / "late")
    gang.apart(0)
    gang.restarts(lambda: os.kill(gang.job.ranks[1].pid, signal.SIGKILL))
    gang.apart(1)
    # With it torchrun, which has the store in which the ranks tell each other what they have.
    gang.restarts(lambda: kill_all(processes(f"GPUSLICE_SOCKET={gangs.socket('')}")))
    assert gang.job.failures == 2
    assert gangs.ends() == undisturbed
