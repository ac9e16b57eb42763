"""Makes a process one of its job's ranks: when it imports torch, or when it joins a process group.

``install`` is called right after the script's ``import torch``, by gpuslice's ``sitecustomize``, in the
process that trains; ``join`` in every process whose script calls ``init_process_group`` (``candidates``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from gpuslice.agent import agent, drill, job_control, turns
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
    """A controller that is started and finished, and may have threads of its own."""

    def start(self) -> None:
        """Begin to control this process, before the script has state or once it is a rank. May block it."""
        ...

    def finish(self) -> None:
        """Stop controlling this process, because the script has ended. Not called if ``start`` has failed."""
        ...

    def end_threads(self) -> None:
        """Stop all threads of the controller. Called last, also if ``start`` has failed.

        A thread that frees a tensor, or is in torch otherwise, while the interpreter is finalized aborts
        the process: Python unwinds the thread out of C++ code that forbids unwinding.
        """
        ...


#: PID of the process that is a rank; 0 before. A fork has another PID, and is no rank until it joins.
_ranks_pid = 0


def install(early: EarlyThreads | None = None) -> None:
    """Install gpuslice's hooks in this process. Make it a rank, if the environment says that it is one.

    Parameters
    ----------
    early
        The script's threads that started before this call.

    Raises
    ------
    SystemExit
        With the error's exit code, after a message, if the user's settings cannot be carried out here.
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
    """Make this process rank ``rank`` of its job, because it has joined a group of ``world_size`` ranks.

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
    """Make this process the job's rank in place of the launcher that started it, because it trains here.

    Nothing happens if the job has several ranks, or if no launcher started this process.

    Parameters
    ----------
    boundary
        Number of the present boundary.

    Returns
    -------
    Sequence of int
        The signals that were held back while the controller was called, to be delivered.

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
    """Make this process a rank, because it has joined a process group. A sole member waits until it trains.

    Called in the process that has the hooks, or in a fork of it.
    """
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
    """Start this process as a rank: connect its controller to the boundaries, and register its end.

    ``replaces`` is the PID of the process that was this rank so far; 0 if there was none.
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
        job.boundaries.controller = control = job_control.JobControl(job)
        control.start()
    if not job.settings.socket:
        job.suspension.in_use.move_in()
    at_end(_end_threads, job.suspension.memory_limit.end, os.getpid())
    job.suspension.memory_limit.begin(job.suspension.in_use.name)
    at_end(_finish, job, controller, os.getpid())


def _forked(job: Runtime) -> None:
    """Prepare this fork of a rank to become a rank itself once it trains.

    Without a scheduler, a fork does not become a rank if its parent has trained or has a named job.
    """
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
    """Finish the checkpoints and the controller, and write the report: the script has ended."""
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
    """The controller of a process that belongs to a job of several ranks, but has not become one of them."""

    def __init__(self, boundaries: BoundaryCounter) -> None:
        self._boundaries = boundaries

    def at_boundary(self, boundary: int) -> Sequence[int]:
        """End the script with an error if it has made an optimizer step: it has no device. Return ``()``.

        It may fetch batches before it becomes a rank.
        """
        if self._boundaries.steps:
            end(
                UsageError(
                    "the job has several devices, and this process trains without being one of its ranks",
                    "call torch.distributed.init_process_group first, start it with torchrun, or submit it "
                    "with --devices 1",
                )
            )
        return ()
