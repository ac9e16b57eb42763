"""Real DDP trainings with ranks on several nodes, each with an agent and a RAM disk of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from gpuslice.clock import MonotonicClock
from gpuslice.config import Settings
from gpuslice.daemon.replicas import Replicas
from gpuslice.launch import command
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Cancelled, Event, Held, Moved, NodeLost, Released
from gpuslice.sched_core.live.scheduler import Scheduler
from gpuslice.sched_core.nodes.local_node import rank_endpoint
from gpuslice.sched_core.nodes.remote_nodes import RemoteNodes
from gpuslice.sched_core.policies.rr import RoundRobin
from gpuslice.sched_core.policy import Policy
from gpuslice.types import DeviceName

from ...gpuslice.conftest import servers, train_undisturbed
from ...gpuslice.warm.process import Servers
from ...patience import PATIENCE_S
from .test_nodes import AGENT, Site

__all__ = ["servers"]

SCRIPT = Path(__file__).parents[1] / "attached_ddp.py"
BRING = Path(__file__).with_name("bring.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
EPOCHS = "20"
OTHERS = ("b", "c")
#: Two slots on each of three nodes: 0, 1 here, 2, 3 on b, 4, 5 on c.
SLOTS = 2

pytestmark = [pytest.mark.slow, pytest.mark.nodes]


def digest(text: str) -> str:
    found = re.findall(r"^digest (\w{64})$", text, re.MULTILINE)
    assert len(found) == 1, text
    return str(found[0])


def processes(mark: str) -> list[int]:
    """Those with that entry in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


class Gangs(Site):
    """A scheduler of two slots here, two on node b and two on c."""

    def __init__(self, directory: Path, ramdisks: Path, lost_after_s: float) -> None:
        self.noted: list[str] = []
        self.ramdisks = ramdisks
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.replicas: Replicas | None = None
        self.enough = directory / "enough"
        super().__init__(directory, lost_after_s)

    def open(self, *, keep: bool = True) -> None:
        nodes = ("", *OTHERS)
        devices = [DeviceName("cpu", slot).on(node) for node in nodes for slot in range(SLOTS)]
        self.core = Core(devices, self.policy())
        self.remote = RemoteNodes(
            dict.fromkeys(nodes, "127.0.0.1"),
            f"tcp://127.0.0.1:{self.port}",
            self.keys,
            MonotonicClock(),
            lost_after_s=self.lost_after_s,
            transfer=self.bring,
        )
        self.scheduler = Scheduler(
            self.core, self.directory / "s", keep_jobs=keep, observer=self._observe, remote=self.remote
        )

    def policy(self) -> Policy:
        """Who decides."""
        return RoundRobin(quantum_s=600.0)

    def bring(self, job: str, sources: Sequence[str], targets: Sequence[str]) -> list[str]:
        living = [name for name in ("", *OTHERS) if self.ramdisk(name).exists()]
        flags = {name: self._flags(name) for name in living}
        (self.directory / "nodes.json").write_text(json.dumps(flags))
        return [sys.executable, str(BRING), str(self.directory / "nodes.json"), job, *targets]

    def ramdisk(self, node: str) -> Path:
        return self.ramdisks / (node or "here")

    def _flags(self, node: str) -> dict[str, str]:
        return {"ramdisk_dir": str(self.ramdisk(node)), "socket": self.socket(node)}

    def socket(self, node: str) -> str:
        """Where its ranks report."""
        return rank_endpoint(self.directory / (node or "s"))

    def run(self, until: Callable[[], bool]) -> None:
        """Until something holds, or the gang has failed for good."""

        def over() -> bool:
            jobs = self.core.jobs.values()
            return until() or any(job.state is JobState.FAILED and job.processes_gone for job in jobs)

        super().run(over)
        assert until(), self.output("g", "err")[-4000:]

    def begin_agents(self) -> None:
        for name in OTHERS:
            self.ramdisk(name).mkdir(mode=0o700, exist_ok=True)
            words = [name, str(self.directory / name), self.remote.endpoint, str(self.keys)]
            words.append(f"GPUSLICE_RAMDISK_DIR={self.ramdisk(name)}")
            self.agents[name] = subprocess.Popen([sys.executable, str(AGENT), *words])
        self.ramdisk("").mkdir(mode=0o700, exist_ok=True)
        self.run(lambda: all(node.joined for node in self.remote.nodes.values()))

    def gang(self, *devices: int, checkpoint_every: int = 0, **spec: int) -> Gang:
        """A gang of two that trains on ``devices``."""
        place = str(self.ramdisk(""))
        settings = Settings(device="cpu:0", ramdisk_dir=place, checkpoint_every=checkpoint_every)
        environ = command.environment(settings, {**os.environ, "OMP_NUM_THREADS": "1"})
        program = Program((*TORCHRUN, str(SCRIPT), EPOCHS, str(self.enough)), "/", environ)
        spec_of = JobSpec(id="g", submit_s=0.0, devices=len(devices), **spec)
        self.scheduler.submit(spec_of, program)
        job = self.core.jobs["g"]
        self.move(job, *devices)
        return job

    def move(self, job: Gang, *devices: int) -> None:
        names = tuple(str(self.core.devices[device]) for device in devices)
        self.scheduler.apply_request(Moved(job.id, names))
        self.trains(lambda: job.lease == devices)

    def trains(self, holds=lambda: True) -> None:  # type: ignore[no-untyped-def]
        """Until the gang has made some more steps since what ``holds``."""
        job = self.core.jobs["g"]
        self.run(lambda: holds() and job.state is JobState.RUNNING and job.processes.trains)
        before = [rank.boundary for rank in job.ranks]
        self.run(lambda: all(rank.boundary > at + 2 for rank, at in zip(job.ranks, before, strict=True)))

    def park(self, job: Gang) -> None:
        self.scheduler.apply_request(Held(job.id))
        self.run(lambda: job.state is JobState.SUSPENDED)

    def unpark(self, job: Gang) -> None:
        self.scheduler.apply_request(Released(job.id))
        self.trains()

    def replicate(self) -> None:
        """Copy every snapshot of a suspended job to the node after that of each rank."""
        assert self.remote.transfers is not None
        self.replicas = Replicas(
            self.core,
            1,
            self.remote.transfers,
            lambda note: self.noted.append(note.what),
            self.scheduler.now,
        )

    def _observe(self, event: Event, now: float, commands) -> None:  # type: ignore[no-untyped-def]
        super()._observe(event, now, commands)
        if self.replicas is not None:
            self.replicas.see(event)

    def lose(self, name: str) -> None:
        """A node dies with all that runs there, and what is in its RAM disk."""
        self.agents[name].kill()
        self.agents.pop(name).wait()
        mark = f"GPUSLICE_RAMDISK_DIR={self.ramdisk(name)}"
        for pid in processes(mark):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.ramdisk(name))

    def ends(self) -> str:
        self.enough.touch()
        assert self.finish("g") == [JobState.SUCCEEDED], self.output("g", "err")
        return digest(self.output("g"))

    def close(self) -> None:
        self.enough.touch()
        for job in self.core.jobs.values():
            if not job.state.ended:
                self.scheduler.apply_request(Cancelled(job.id, "the test is over"))
        self.scheduler.run(
            lambda: all(job.processes_gone for job in self.core.jobs.values()), timeout_s=PATIENCE_S
        )
        self.remote.dismiss()
        self.scheduler.close()
        for agent in self.agents.values():
            agent.wait(PATIENCE_S)


@pytest.fixture(params=[PATIENCE_S])
def gangs(tmp_path: Path, ramdisks: Path, request: pytest.FixtureRequest) -> Iterator[Gangs]:
    made = Gangs(tmp_path, ramdisks, request.param)
    try:
        made.begin_agents()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, servers: Servers) -> str:
    directory = tmp_path_factory.mktemp("undisturbed")
    enough = directory / "enough"
    enough.touch()
    return digest(train_undisturbed(directory, servers, 2, str(SCRIPT), EPOCHS, str(enough)))


def test_a_gang_on_two_nodes_is_suspended_and_moves_with_the_snapshot_of_each_rank(
    gangs: Gangs, undisturbed: str
) -> None:
    job = gangs.gang(0, 2)
    assert job.nodes == (0, 1)
    for devices in ((0, 4), (2, 3), (1, 5)):  # one rank; both, to one node; and apart
        gangs.park(job)
        gangs.unpark(job)
        gangs.move(job, *devices)
    assert job.failures == 0
    assert len(gangs.notes("relocated")) >= 3
    assert gangs.ends() == undisturbed


def test_a_gang_outlives_the_scheduler_while_it_trains_and_while_it_is_parked(
    gangs: Gangs, undisturbed: str
) -> None:
    gangs.gang(0, 2)
    gangs.reopen()
    gangs.trains()
    gangs.park(gangs.core.jobs["g"])
    gangs.reopen()
    job = gangs.core.jobs["g"]
    assert job.state is JobState.SUSPENDED
    gangs.unpark(job)
    assert job.attempt == job.relaunches
    assert gangs.ends() == undisturbed


@pytest.mark.parametrize("gangs", [20.0], indirect=True)
def test_a_node_that_dies_loses_no_gang_of_which_each_rank_has_a_copy_elsewhere(
    gangs: Gangs, undisturbed: str
) -> None:
    gangs.replicate()
    job = gangs.gang(0, 2, max_restarts=1, wait_for_node_s=0)
    gangs.park(job)
    gangs.run(lambda: gangs.noted == ["replicated"])
    gangs.unpark(job)
    gangs.lose("b")
    gangs.trains(lambda: bool(gangs.notes("went_without")))
    assert 1 not in job.nodes
    assert job.failures == 0
    assert [note.details["boundary"] for note in gangs.notes("went_on")]
    assert gangs.ends() == undisturbed


@pytest.mark.parametrize("gangs", [20.0], indirect=True)
def test_a_gang_begins_anew_and_says_so_if_no_node_that_is_left_has_the_snapshot_of_a_rank(
    gangs: Gangs, undisturbed: str
) -> None:
    job = gangs.gang(0, 2, max_restarts=1, wait_for_node_s=0)
    gangs.park(job)
    gangs.lose("b")
    gangs.run(lambda: bool(gangs.notes("went_without")))
    gangs.scheduler.apply_request(Released(job.id))  # as long as it is held it is not started again
    gangs.trains(lambda: bool(gangs.notes("begins_anew")))
    assert "no living node has a whole snapshot of g" in gangs.output("g", "err")
    assert job.failures == 0
    assert gangs.ends() == undisturbed
    assert gangs.happened(NodeLost) == [NodeLost("b")]
