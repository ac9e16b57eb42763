"""Locality restored for any policy with a placement: when a job leaves, scattered gangs move together.

A gang moves if the time that it saves by lying closer is worth more than the time that moving costs, its own
and that of the jobs that make room, each times its devices. Free devices cost nothing. A job of one device
loses nothing by lying elsewhere, so it may be sent where the gang was.

Sources of the idea: Gandiva (OSDI 2018), which migrates to improve locality when jobs depart; the Philly
study (Jeon et al., ATC 2019, section 6), which asks for migration against fragmentation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Protocol, runtime_checkable

import msgspec

from gpuslice.sched_core.job import Job
from gpuslice.sched_core.placement.closest import closest
from gpuslice.sched_core.policies.wrapper import Wrapper
from gpuslice.sched_core.policy import (
    Decision,
    Migrate,
    Plan,
    Policy,
    View,
)
from gpuslice.sched_core.slowdown import Slowdown
from gpuslice.types import CONSOLIDATION_SKEW

from .board import Board, switch_s


@runtime_checkable
class Relocatable(Protocol):
    """The interface of policies that can be told of moves. Any other policy is reset after a move."""

    def relocated(self, moves: Mapping[Job, tuple[int, ...]]) -> None:
        """Note that running jobs continue on other devices, which are free or left by another of ``moves``.

        Each ``placement`` is still where its job was.
        """
        ...


class _Move(msgspec.Struct, frozen=True):
    """Where a gang goes, who makes room for it, and what that saves, in device-seconds."""

    gang: Job
    places: dict[Job, tuple[int, ...]]
    saved_s: float


class Defragmenting(Wrapper):
    """A wrapper that moves scattered gangs of ``policy`` together.

    How long a job will still run is what the world knows; where it knows nothing, it is as long as the job
    has run so far. Models whose skew is known to be small are as fast on several nodes, and stay there.

    Parameters
    ----------
    policy
        Decides who runs.
    slowdown
        What lying apart is taken to cost.

    Attributes
    ----------
    gangs, others
        How many gangs moved together, and how many jobs made room for them.
    """

    def __init__(self, policy: Policy, slowdown: Slowdown) -> None:
        super().__init__(policy)
        self._slowdown = slowdown
        self.gangs = self.others = 0
        #: The policy's own picture is not what was decided last.
        self._outdated = False

    @property
    def counters(self) -> dict[str, int]:
        """Return the policy's counters and the numbers of moves."""
        return {**super().counters, "gangs_moved_together": self.gangs, "jobs_made_room": self.others}

    def plan(self, view: View) -> Plan:
        """Return the policy's plan and, if a job left, the moves that pay."""
        departed = view.changes.reset or any(job.running for job in view.changes.finished)
        if self._outdated:
            self._outdated, view.changes = False, view.changes.outdated()
        plan = self.policy.plan(view)
        if not departed:
            return plan
        moves = self._moves(plan.decisions, view)
        if not moves:
            return plan
        if isinstance(self.policy, Relocatable):
            self.policy.relocated(moves)
        else:
            self._outdated = True
        decisions = [Migrate(job.id, devices) for job, devices in moves.items()]
        return Plan([*plan.decisions, *decisions], plan.wake_at_s)

    def _moves(self, decisions: Sequence[Decision], view: View) -> dict[Job, tuple[int, ...]]:
        """Return the new devices of the jobs that should move; none if no move pays.

        Jobs that save most choose first.
        """
        decided = {decision.job for decision in decisions}
        settled = [job for job in view.running() if job.id not in decided and job.since_s <= view.now_s]
        found = [(self._excess(job, view) * job.demand, job) for job in settled if len(job.placement) > 1]
        scattered = [(saved, job) for saved, job in found if saved > 0]
        if not scattered:
            return {}
        board = Board(view, decisions, settled)
        moves: dict[Job, tuple[int, ...]] = {}
        for _, gang in sorted(scattered, key=lambda pair: (-pair[0], pair[1].number)):
            move = self._best(gang, board, view)
            if move is not None:
                moves |= move.places
                board.move(move.places)
                self.gangs += 1
                self.others += len(move.places) - 1
        return moves

    def _excess(self, job: Job, view: View) -> float:
        """Return the seconds that ``job`` would save on the closest possible devices."""
        return _left_s(job, view) * (self._slowed(job, job.placement, view) - 1.0)

    def _slowed(self, job: Job, devices: Sequence[int], view: View) -> float:
        if job.skew is not None and job.skew < CONSOLIDATION_SKEW:
            return 1.0
        return self._slowdown.on(job.spec, devices, view.cluster)

    def _best(self, gang: Job, board: Board, view: View) -> _Move | None:
        """Return the move of ``gang`` that saves most. Return None if no move saves anything."""
        now = self._slowed(gang, gang.placement, view)
        count = len(gang.placement)
        best: _Move | None = None
        for devices in closest(count, board.prices(gang, view), view.cluster):
            saved_s = _left_s(gang, view) * (now - self._slowed(gang, devices, view)) * count
            places = board.places(gang, devices)
            if not all(
                job.may_be_on(view.cluster.nodes(to)) and job.may_have(to) for job, to in places.items()
            ):
                continue
            saved_s -= sum(switch_s(job, to, view) * len(to) for job, to in places.items())
            if saved_s > 0 and (best is None or saved_s > best.saved_s):
                best = _Move(gang, places, saved_s)
        return best


def _left_s(job: Job, view: View) -> float:
    """Return the job's remaining work, in seconds of a dedicated run."""
    duration_s, done_s = view.knowledge.duration_s(job), job.progress_at(view.now_s)
    return done_s if duration_s is None or duration_s == inf else max(0.0, duration_s - done_s)
