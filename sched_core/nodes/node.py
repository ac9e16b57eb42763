"""The interface to the processes of jobs on one node, and the reports from it.

Everything that happens to a process is reported through ``Reports``, in order: the last messages of a rank
come before its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from gpuslice.sched_core.job import GRACE_S
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.lifecycle.events import Exited, RankGone
from gpuslice.types import ByteCount, Count, JobName, Pid, RankNumber, Seconds


class Connection(NamedTuple):
    """A rank's connection: the node on which it connected, and its identity there."""

    node: str
    identity: bytes


class Sought(msgspec.Struct, frozen=True):
    """A job whose processes were started by another scheduler, or over an earlier connection to the node.

    Attributes
    ----------
    exited
        True if the end of its command is known already.
    ended
        True if the job is over, or will be started again, so that its remaining processes must end.
    ranks
        Numbers and processes of the ranks that were there when last heard of.
    grace_s
        How long they have for that when they have been asked; 0: they are not.
    copied
        How much of its output and of its errors has been copied from that node.
    """

    job: JobName
    attempt: Count
    exited: bool
    ended: bool
    ranks: tuple[tuple[RankNumber, Pid], ...]
    grace_s: Seconds = GRACE_S
    copied: tuple[ByteCount, ByteCount] = (0, 0)


@dataclass(frozen=True)
class Reports:
    """The functions to which a node reports.

    Attributes
    ----------
    heard
        Called with each frame of a rank: connection, process, frame.
    ended
        Called when a command or a rank has ended: the node's name, what has ended.
    missing
        Called with the node's name, a job and its attempt that was sought, if its command was never started.
    port_found
        Called with a job, which attempt of it, and the port at which its ranks meet.
    waits_ahead
        Called with a job and its attempt when its command, which was started ahead, waits for its turn.
        Called, too, if it has ended or could not be started.
    """

    heard: Callable[[Connection, int, bytes], object]
    ended: Callable[[str, Exited | RankGone], object]
    missing: Callable[[str, str, int], object]
    port_found: Callable[[str, int, int], object]
    waits_ahead: Callable[[str, int], object] = lambda job, attempt: None


class Node(Protocol):
    """The interface of a node. See ``local_node.LocalNode``."""

    def launch(self, job: str, program: Program, environ: Mapping[str, str], attempt: int) -> None: ...
    def start_ahead(self, job: str, program: Program, environ: Mapping[str, str], attempt: int) -> None: ...
    def give_up_ahead(self, job: str) -> None: ...
    def find_port(self, job: str, attempt: int) -> None: ...
    def find(self, sought: Sought) -> None: ...
    def watch_rank(self, job: str, attempt: int, rank: int, pid: int, identity: bytes) -> None: ...
    def send(self, identity: bytes, frame: bytes) -> None: ...
    def end(self, job: str, attempt: int, *, grace_s: float) -> None: ...
