"""Snapshots of jobs that have ended for good: they are removed on every node once their jobs have ended."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from threading import Thread

from gpuslice.config import Settings, load
from gpuslice.errors import GpusliceError
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Event, NodeFound
from gpuslice.sched_core.nodes.local_node import rank_endpoint
from gpuslice.sched_core.nodes.node_wire import Forget
from gpuslice.sched_core.nodes.remote_nodes import RemoteNode

_AT_ONCE = 500
_log = logging.getLogger(__name__)


def forget(directory: Path, jobs: Sequence[str], *, spill_dir: str = "") -> None:
    """Remove the snapshots here of ``jobs`` of the scheduler or agent of ``directory``, in a thread.

    ``spill_dir`` is the spill directory if the settings of this node do not say it.
    """
    settings = load(socket=rank_endpoint(directory), spill_dir=spill_dir or None)
    Thread(target=_forget, args=(settings, set(jobs)), name="forget", daemon=True).start()


def _forget(settings: Settings, jobs: Collection[str]) -> None:
    try:
        if not _has_any(settings, jobs):
            return
        # Late: it takes longer to import than all the rest.
        from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk

        RamDisk.from_settings(settings).forget(jobs)
    except (GpusliceError, OSError) as error:
        _log.warning("snapshots of %s stay in the RAM disk: %s", ", ".join(jobs), error)


def _has_any(settings: Settings, jobs: Collection[str]) -> bool:
    """Return True if the RAM disk or the spill directory may have something of ``jobs``."""
    places = [settings.ramdisk_directory]
    if settings.spill_dir:
        places.append(Path(settings.spill_dir))
    names = (name for place in places if place.is_dir() for name in os.listdir(place))
    return any(name.partition("@")[0] in jobs for name in names)


class Leftovers:
    """The jobs that were cancelled or have ended well, and the nodes that may have snapshots of them.

    Parameters
    ----------
    core
        Knows the jobs; only read.
    own
        Removes what jobs have left on this node.
    others
        The other nodes, by name.
    """

    def __init__(
        self, core: Core, own: Callable[[Sequence[str]], object], others: Mapping[str, RemoteNode]
    ) -> None:
        self._core = core
        self._own = own
        self._others = others
        # An earlier scheduler may have been killed before it told all nodes.
        over = {job.id: None for job in core.jobs.values() if _is_over(job)}
        #: What each node is still to be told; "" is this one.
        self._untold = {name: dict(over) for name in ("", *others)}

    def see(self, event: Event) -> None:
        """Tell the nodes which job is over, if ``event`` ended the last of it or tells of a copy of it."""
        job = self._core.jobs.get(getattr(event, "job", ""))
        if job is not None and _is_over(job):
            for untold in self._untold.values():
                untold[job.id] = None
        elif isinstance(event, NodeFound) and event.node in self._untold:  # it may not have heard all
            over = [job.id for job in self._core.jobs.values() if _is_over(job)]
            self._untold[event.node] |= dict.fromkeys(over)

    def tell(self) -> None:
        """Tell the nodes that are connected what they were not told yet."""
        for name, untold in self._untold.items():
            if not untold or (name and not self._others[name].joined):
                continue
            jobs = [job for job in untold if _is_over(self._core.jobs[job])]  # else its owner wants it again
            untold.clear()
            for first in range(0, len(jobs), _AT_ONCE):
                some = jobs[first : first + _AT_ONCE]
                if name:
                    self._others[name].tell(Forget(jobs=tuple(some)))
                else:
                    self._own(some)


def _is_over(job: Gang) -> bool:
    """Return True if ``job`` has trained and ended for good, and nothing is left of its processes."""
    ended = job.state in (JobState.SUCCEEDED, JobState.CANCELLED)
    return ended and job.processes_gone and bool(job.state_nodes)
