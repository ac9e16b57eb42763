"""Makes and returns this process's own runtime.

Under ``gpuslice run`` the hooks make it when torch is imported, or when the process becomes a rank.
Elsewhere the first use makes it.
"""

from __future__ import annotations

import os

from gpuslice import config
from gpuslice.errors import GpusliceError
from gpuslice.files import occupy_closed_streams
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.runtime import trainings
from gpuslice.runtime.boundaries import counter
from gpuslice.runtime.ending import at_end, say, watch_exit
from gpuslice.runtime.runtime import Runtime

_runtime: Runtime | None = None
_runtimes_pid = 0


def renew(identity: RankIdentity) -> Runtime:
    """Make and return a new runtime for this process, which has become a rank. A fork gets its own."""
    return _make(identity, _runtime)


def own() -> Runtime:
    """Return this process's runtime. In a fork, the parent's runtime becomes the fork's own."""
    job = runtime()
    if _runtimes_pid != os.getpid():
        job.suspension.gate = job.suspension.gate.forked()
        _at_end_of(job)
    return job


def runtime() -> Runtime:
    """Return this process's runtime. The first call makes it from the settings in the environment.

    Raises
    ------
    ConfigError
        If the settings are wrong.
    """
    return _make(RankIdentity.from_environ(os.environ)) if _runtime is None else _runtime


def _make(identity: RankIdentity, former: Runtime | None = None) -> Runtime:
    global _runtime
    occupy_closed_streams()  # before anything of ours is opened
    _runtime = Runtime(config.load(), identity, counter)
    if former is None:
        _runtime.suspension.gate.install()
    else:
        gate = former.suspension.gate
        _runtime.suspension.gate = gate if _runtimes_pid == os.getpid() else gate.forked()
    _at_end_of(_runtime)
    return _runtime


def _at_end_of(job: Runtime) -> None:
    global _runtimes_pid
    _runtimes_pid = os.getpid()
    watch_exit()
    at_end(_close, job, os.getpid())


def _close(job: Runtime, pid: int) -> None:
    if os.getpid() == pid:  # a fork that ends by itself is not the job
        try:
            trainings.close(job)
        except GpusliceError as error:  # a GPU that its script's error has made useless, say
            say(error.message, error.remedy)
