"""A scheduler, its jobs and their surroundings, maltreated at random; in the end every job is accounted for.

What was done to a job says how it may end (``Fate``). Besides that: no two ranks are ever on one device, the
journal replays to what the scheduler says, no invariant is ever broken, every finished training has the
digest of an undisturbed one, and no process is left.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil
import zmq

from gpuslice.client.client import Client
from gpuslice.daemon.replay import JournalReplay
from gpuslice.errors import UsageError
from gpuslice.sched_core.journal.journal import FILE
from gpuslice.sched_core.lifecycle.timeouts import GANG_TIMEOUT_S
from gpuslice.verbs import JobInfo

from ..patience import PATIENCE_S
from .conftest import RANK, Shell

TRAINING = Path(__file__).parents[2] / "gpuslice" / "demo" / "jobs" / "wine.py"
STEPS = 600
_MOST_UNFINISHED = 6
_MOST_TRAININGS = 2
_OPTIONS = ("--devices", "cpu:2", "--quantum", "150ms")


@dataclass
class Fate:
    """One job, and how it may end.

    Attributes
    ----------
    steps
        How many it does; ``None``: a training, whose digest is looked at.
    ranks
        How many it has.
    may
        The states in which it may end.
    held, stopped
        Whether its owner suspended it, and its processes that got SIGSTOP, with the time of that.
    """

    steps: int | None
    ranks: int = 1
    may: set[str] = field(default_factory=lambda: {"succeeded"})
    held: bool = False
    stopped: list[tuple[psutil.Process, float]] = field(default_factory=list)


class Chaos:
    """Random mischief against one scheduler.

    Parameters
    ----------
    shell
        Reaches the scheduler.
    seed
        Of all that is random here; how fast the machine is remains.
    """

    def __init__(self, shell: Shell, seed: int) -> None:
        self._shell = shell
        self._random = random.Random(seed)
        self.fates: dict[str, Fate] = {}
        self.done: Counter[str] = Counter()
        #: What finished trainings printed last.
        self.digests: set[str] = set()
        self._locks = shell.directory.parent / "locks"
        self._locks.mkdir()
        self._environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GPUSLICE_RAMDISK_DIR": str(shell.directory.parent / "ramdisk"),
            "RANK_LOCKS": str(self._locks),
        }
        self._client: Client = shell.client()
        self._context = zmq.Context()
        self._silent: list[zmq.Socket[bytes]] = []
        self._acts: list[tuple[Callable[[], bool], int]] = [
            (self.submit_job, 14),
            (self.submit_gang, 5),
            (self.submit_training, 6),
            (self.suspend_one, 9),
            (self.resume_one, 9),
            (self.migrate_one, 8),
            (self.weight_one, 3),
            (self.cancel_one, 3),
            (self.kill_rank, 4),
            (self.kill_supervisor, 2),
            (self.kill_scheduler, 3),
            (self.stop_one, 4),
            (self.continue_one, 8),
            (self.talk_garbage, 3),
            (self.say_nothing, 2),
        ]

    def run(self, duration_s: float) -> None:
        """Do mischief for so long and of every kind, then let everything come to its end and look at it."""
        self._shell("up", *_OPTIONS)
        try:
            self._rampage(duration_s)
            self._let_finish()
        finally:
            for socket in self._silent:
                socket.close()
            self._context.term()

    def _rampage(self, duration_s: float) -> None:
        ends_s = time.monotonic() + duration_s
        while (still := time.monotonic() < ends_s) or len(self.done) < len(self._acts):
            # In the end only what has not been done yet, and new jobs to do it to.
            likely = [
                (act, weight)
                for act, weight in self._acts
                if still or act.__name__ not in self.done or act == self.submit_job
            ]
            (act,) = self._random.choices(*zip(*likely, strict=True))
            try:
                if act():
                    self.done[act.__name__] += 1
            except UsageError as error:
                # Between our looking and our asking the job has ended, or its owner changed his mind.
                if "impossible" not in error.message:
                    raise
            self._pause()

    # Mischief: each says whether there was anybody to do it to.

    def submit_job(self) -> bool:
        return self._submit(self._random.randint(1, 400), ranks=1)

    def submit_gang(self) -> bool:
        return self._submit(self._random.randint(1, 300), ranks=2)

    def _submit(self, boundaries: int, ranks: int) -> bool:
        if len(self._unfinished()) >= _MOST_UNFINISHED:
            return False
        words = ["--", sys.executable, str(RANK), str(boundaries), "0"]
        late: Literal["leave", "kill"] = self._random.choice(["leave", "kill"])
        job = self._client.submit(
            words,
            devices=ranks,
            environ={**self._environ, "WORLD": str(ranks)},
            max_restarts=self._random.choice([0, 0, 1, 2]),
            trial=self._random.choice([False, False, True]),
            steps=boundaries,
            deadline_s=self._random.choice([0.0, 0.0, 3.0]),
            boundary_timeout_s=self._random.choice([1.0, 60.0]),
            on_boundary_timeout=late,
        )
        self.fates[job] = Fate(boundaries, ranks)
        if late == "kill":
            self.fates[job].may.add("failed")
        return True

    def submit_training(self) -> bool:
        present = self._unfinished()
        trainings = sum(self.fates[name].steps is None for name in present)
        if len(present) >= _MOST_UNFINISHED or trainings >= _MOST_TRAININGS:
            return False
        words = [str(TRAINING), "--steps", str(STEPS)]
        self.fates[self._client.submit(words, environ=self._environ)] = Fate(None)
        return True

    def suspend_one(self) -> bool:
        job = self._choose(lambda name: not self.fates[name].held)
        if job is None:
            return False
        self._client.suspend(job)
        self.fates[job].held = True
        return True

    def resume_one(self) -> bool:
        job = self._choose(lambda name: self.fates[name].held)
        if job is None:
            return False
        self._client.resume(job)
        self.fates[job].held = False
        return True

    def migrate_one(self) -> bool:
        job = self._choose(lambda name: True)
        if job is None:
            return False
        to = self._random.sample(["cpu:0", "cpu:1"], self.fates[job].ranks)
        self._client.migrate(job, to)
        return True

    def weight_one(self) -> bool:
        job = self._choose(lambda name: True)
        if job is None:
            return False
        self._client.weight(job, self._random.choice([0.5, 1.0, 3.0]))
        return True

    def cancel_one(self) -> bool:
        job = self._choose(lambda name: True)
        if job is None:
            return False
        self.fates[job].may.add("cancelled")
        self._client.cancel(job)
        return True

    def kill_rank(self) -> bool:
        job = self._choose(lambda name: True)
        ranks = [] if job is None else self._shell.processes_of(job)
        if job is None or not ranks:
            return False
        self.fates[job].may.add("failed")
        self._signal(self._random.choice(ranks), signal.SIGKILL)
        return True

    def kill_supervisor(self) -> bool:
        job = self._choose(lambda name: True)
        found = [] if job is None else self._shell.processes_of(job, supervisors=True)
        if job is None or not found:
            return False
        self.fates[job].may.add("failed")
        self._signal(found[0], signal.SIGKILL)
        return True

    def kill_scheduler(self) -> bool:
        self._shell.kill()
        self._pause()  # a time without any
        self._shell("up", *_OPTIONS)
        return True

    def stop_one(self) -> bool:
        job = self._choose(lambda name: not self.fates[name].stopped)
        ranks = [] if job is None else self._shell.processes_of(job)
        if job is None or not ranks:
            return False
        chosen = self._random.choice(ranks)
        self._signal(chosen, signal.SIGSTOP)
        self.fates[job].stopped.append((chosen, time.monotonic()))
        return True

    def continue_one(self) -> bool:
        found = [fate for fate in self.fates.values() if fate.stopped]
        if not found:
            return False
        self._continue(self._random.choice(found))
        return True

    def _continue(self, fate: Fate) -> None:
        """Let the process go on that was stopped last."""
        process, since_s = fate.stopped.pop()
        if fate.ranks > 1 and time.monotonic() - since_s > GANG_TIMEOUT_S / 2:
            fate.may.add("failed")  # a gang fails that is not whole for so long; it had to start, too
        self._signal(process, signal.SIGCONT)

    def talk_garbage(self) -> bool:
        with self._stranger() as socket:
            for _ in range(self._random.randint(1, 200)):
                socket.send(self._random.randbytes(self._random.randint(0, 60)))
        return True

    def say_nothing(self) -> bool:
        self._silent.append(self._stranger())
        return True

    def _stranger(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 100)
        socket.connect(f"ipc://{self._shell.directory / self._random.choice(['scheduler', 'client'])}.sock")
        return socket

    # The end.

    def _let_finish(self) -> None:
        for name, fate in self.fates.items():
            while fate.stopped:
                self._continue(fate)
            if fate.held and name in self._unfinished():
                self._client.resume(name)
        found = {}
        for name in self.fates:
            ended = self._client.wait(name, PATIENCE_S)
            assert ended is not None, self._standing(name)
            found[name] = ended
        self._check_jobs(found)
        self._check_journal(found)
        standing = self._client.status()
        assert {device.name: device.jobs for device in standing.devices} == {"cpu:0": (), "cpu:1": ()}
        assert [job.id for job in standing.jobs] == list(self.fates)
        left = [process.cmdline() for name in self.fates for process in self._shell.processes_of(name)]
        assert left == []
        self._shell("down")

    def _check_jobs(self, found: dict[str, JobInfo]) -> None:
        digests = set()
        for name, fate in self.fates.items():
            job, logs = found[name], self._client.logs(name)
            if not Path(logs.out).exists():
                assert job.state == "cancelled" in fate.may, job  # before it was started
                continue
            out = Path(logs.out).read_text()
            assert job.state in fate.may, (job, Path(logs.err).read_text()[-2000:])
            assert "clash" not in out, (name, out)
            if job.state == "succeeded" and fate.steps is None:
                digests.add(out.splitlines()[-1])
            elif job.state == "succeeded":
                assert out.splitlines()[-1] == f"ends at {fate.steps}", (job, out)
        self.digests = digests

    def _check_journal(self, found: dict[str, JobInfo]) -> None:
        with JournalReplay(self._shell.directory / FILE) as replay:
            for _ in replay.advance():
                replay.core.check()
        states = {job.id: job.state.value for job in replay.core.jobs.values()}
        assert states == {name: job.state for name, job in found.items()}

    # Who is there.

    def _unfinished(self) -> list[str]:
        return [job.id for job in self._client.jobs() if not job.ended]

    def _choose(self, suits: Callable[[str], bool]) -> str | None:
        names = [name for name in self._unfinished() if suits(name)]
        return self._random.choice(names) if names else None

    def _signal(self, process: psutil.Process, number: signal.Signals) -> None:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            return  # it was quicker

    def _pause(self) -> None:
        time.sleep(self._random.expovariate(8.0))

    def _standing(self, name: str) -> object:
        infos = [job for job in self._client.jobs() if job.id == name]
        return infos, self.fates[name], list(self._client.events())[-30:], self.done
