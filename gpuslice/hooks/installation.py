"""Makes a process one of its job's ranks: when it imports torch, or when it joins a process group.

``install`` is called right after the script's ``import torch``, by gpuslice's ``sitecustomize``, in the
process that trains; ``join`` in every process whose script calls ``init_process_group`` (``candidates``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from gpuslice.agent import agent, drill, turns
from gpuslice.agent.boundary_watchdog import BoundaryWatchdog
from gpuslice.checkpoint.discover.heap import hide_imports
from gpuslice.errors import GpusliceError, UsageError
from gpuslice.hooks import elastic_jobs, late_imports, process_groups, profiling
from gpuslice.hooks.hooks import count_boundaries
from gpuslice.hooks.single_rank_groups import watch_for_training
from gpuslice.launch.rank_identity import ARMED, RankIdentity
from gpuslice.limits import shared_memory
from gpuslice.runtime import foreign_processes, trainings, uncaught
from gpuslice.runtime.boundaries import NEVER, BoundaryCounter, Controller
from gpuslice.runtime.current import own, renew, runtime
from gpuslice.runtime.ending import at_end, end, ended_well, say
from gpuslice.runtime.runtime import Runtime
from gpuslice.runtime.threads.thread_gate import EarlyThreads


class JobController(Controller, Protocol):
    """A controller with a beginning and an end, and perhaps threads."""

    def start(self) -> None:
        """Called before the script has any state, or as soon as it is a rank; may hold it there."""
        ...

    def finish(self) -> None:
        """Called when the script has ended, if it could begin."""
        ...

    def end_threads(self) -> None:
        """Called last, also if ``start`` has failed: no thread of its may be alive afterwards.

        One that frees a tensor, or is in torch otherwise, while the interpreter is finalized aborts the
        process: Python unwinds it then, out of C++ that forbids that.
        """
        ...


#: The process that is a rank here: what it forks is none until it joins.
_ranks_pid = 0


def install(early: EarlyThreads | None = None) -> None:
    """Make this process a job under gpuslice, as the settings in the environment say.

    Parameters
    ----------
    early
        The script's threads that have started before.

    Raises
    ------
    SystemExit
        After a message, with the error's exit code, if what the user asked for is impossible here.
    """
    _explain_errors()
    try:
        job = runtime()
        if early is not None:
            job.suspension.gate.take_in(early)
        job.suspension.main_thread.listen()
        is_rank = job.settings.ranks <= 1 or "RANK" in os.environ
        if job.settings.profile and is_rank:
            profiling.install(job)
        count_boundaries(job.boundaries)
        foreign_processes.announce_on_cuda()
        process_groups.watch(_joined)
        if not is_rank:
            os.register_at_fork(after_in_child=job.boundaries.forget_controller)
            job.boundaries.controller, job.boundaries.stop_at = NoRank(job.boundaries), 1
        else:
            _begin(job)
    except GpusliceError as error:
        end(error)
    hide_imports()
    late_imports.hide_before_the_first_module()


def join(rank: int, world_size: int) -> None:
    """Make this process, which has joined a process group, that rank of the job.

    Raises
    ------
    SystemExit
        As `install`.
    """
    try:
        if _ranks_pid == os.getpid() and runtime().settings.elastic:
            elastic_jobs.check_group(runtime())
        identity = RankIdentity.in_group(rank, world_size, os.environ)
        os.environ[ARMED] = f"{rank} {os.getpid()}"
        if _ranks_pid == os.getpid():
            if "RANK" not in os.environ:
                _check_ranks(runtime(), identity)
                runtime().set_rank(identity)
            return
        _explain_errors()
        job = renew(identity)
        _check_ranks(job, identity)
        if job.settings.profile:
            profiling.install(job)
        _begin(job)
    except GpusliceError as error:
        end(error)


def take_over(boundary: int) -> Sequence[int]:
    """Make this process, which trains at this boundary, the job's rank in place of the one that started it.

    Returns
    -------
    Sequence of int
        The signals whose handlers could not run meanwhile.

    Raises
    ------
    SystemExit
        As `install`.
    """
    launcher = process_groups.below_a_launcher(os.environ)
    _explain_errors()
    try:
        job = own()
        if job.settings.ranks > 1 or not launcher:
            return ()
        os.environ[ARMED] = f"0 {os.getpid()}"
        if job.settings.profile:
            profiling.install(job)
        _begin(job, replaces=launcher)
    except GpusliceError as error:
        end(error)
    controller = job.boundaries.controller
    asked = controller is not None and boundary >= job.boundaries.stop_at
    return controller.at_boundary(boundary) if controller is not None and asked else ()


def _explain_errors() -> None:
    def explain(error: BaseException) -> str:
        job = runtime()
        directory = job.settings.ramdisk_directory
        return job.suspension.memory_limit.explain(error) or shared_memory.explain(error, directory)

    uncaught.install(explain)


def _joined(rank: int, world_size: int) -> None:
    """In the process that has the hooks, or in a fork of it."""
    if world_size == 1:
        watch_for_training(runtime().boundaries, take_over)
    elif not process_groups.below_a_rank(os.environ):
        join(rank, world_size)


def _check_ranks(job: Runtime, identity: RankIdentity) -> None:
    if job.settings.socket and job.settings.ranks != identity.world_size:
        raise UsageError(
            f"the script makes a process group of {identity.world_size} ranks, but its job has "
            f"{job.settings.ranks} device{'' if job.settings.ranks == 1 else 's'}",
            f"submit it with --devices {identity.world_size}",
        )


def _begin(job: Runtime, *, replaces: int = 0) -> None:
    """Let somebody ask for this rank's boundaries, from now to its end.

    ``replaces``: the process that has been this rank so far.
    """
    global _ranks_pid
    _ranks_pid = os.getpid()
    foreign_processes.become_rank()
    trainings.note_start(job)
    if job.settings.elastic:
        elastic_jobs.watch_steps(job)
    controller = _controller(job, replaces)
    job.boundaries.controller, job.boundaries.stop_at = controller, NEVER
    os.register_at_fork(after_in_child=partial(_forked, job))
    if job.settings.checkpoint_every:
        job.saving.every(job.settings.checkpoint_every)
    if controller is not None:
        at_end(_end_threads, controller.end_threads, os.getpid())
        job.suspension.keep_ready()
        controller.start()
    else:
        watch = BoundaryWatchdog(job.boundaries)
        at_end(_end_threads, watch.stop, os.getpid())
        watch.start()
    if not job.settings.socket:
        job.suspension.in_use.move_in()
    at_end(_end_threads, job.suspension.memory_limit.end, os.getpid())
    job.suspension.memory_limit.begin(job.suspension.in_use.name)
    at_end(_finish, job, controller, os.getpid())


def _forked(job: Runtime) -> None:
    """Have a fork become a rank if it trains. If its parent has trained, it does so beside that."""
    job.boundaries.forget_controller()
    if job.settings.socket:
        job.boundaries.steps = 0  # those were the parent's
    if job.settings.socket or not (job.boundaries.trained or job.settings.job):
        watch_for_training(job.boundaries, take_over)


def _controller(job: Runtime, replaces: int) -> JobController | None:
    if job.settings.socket:
        return agent.Agent(job, replaces=replaces)
    return drill.from_settings(job) or turns.from_settings(job)


def _finish(job: Runtime, controller: JobController | None, pid: int) -> None:
    """The script has ended, well or not."""
    if os.getpid() != pid:
        return
    job.boundaries.forget_controller()
    job.boundaries.settle_steps()
    job.checkpoints.settle(keep=not ended_well())
    if controller is not None:
        controller.finish()
    job.write_report()
    if controller is not None or job.settings.report:
        say(job.summary())


def _end_threads(end_them: Callable[[], None], pid: int) -> None:
    if os.getpid() == pid:  # a fork has none of them
        end_them()


class NoRank:
    """Controls a process of a job of several ranks before it, or what it starts, has become one of them."""

    def __init__(self, boundaries: BoundaryCounter) -> None:
        self._boundaries = boundaries

    def at_boundary(self, boundary: int) -> Sequence[int]:
        """Data may be looked at, but nobody trains on a device that nobody has given him."""
        if self._boundaries.steps:
            end(
                UsageError(
                    "the job has several devices, and this process trains without being one of its ranks",
                    "call torch.distributed.init_process_group first, start it with torchrun, or submit it "
                    "with --devices 1",
                )
            )
        return ()
