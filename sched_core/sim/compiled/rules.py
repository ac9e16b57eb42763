"""Which simulations can run compiled, and their policies in numbers. Imports no numba."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from gpuslice.sched_core.job import Job
from gpuslice.sched_core.placement.nodes import Consolidated, PublishedYarn
from gpuslice.sched_core.placement.placement import Count
from gpuslice.sched_core.policies.fifo import Fifo, FitFirst, SmallestFirst
from gpuslice.sched_core.policies.las import LeastAttained
from gpuslice.sched_core.policies.published.gandiva import SIZES, PublishedGandiva
from gpuslice.sched_core.policies.published.orders import (
    PublishedExpected,
    PublishedLongestPending,
    PublishedShortest,
)
from gpuslice.sched_core.policies.published.queues import PublishedDlas, PublishedGittins
from gpuslice.sched_core.policies.rr import RoundRobin
from gpuslice.sched_core.policies.shortest import ShortestJob, ShortestRemaining, ShortestRemainingService
from gpuslice.sched_core.policies.tiresias.gittins import GittinsIndex, yarn_services
from gpuslice.sched_core.policies.tiresias.policy import TwoDas, TwoDGittins
from gpuslice.sched_core.sim.cost import MeasuredCost
from gpuslice.sched_core.sim.engine import Simulation
from gpuslice.sched_core.sim.model import FixedCost, LinearSpeed, NoCost
from gpuslice.sched_core.sim.peer import StaleCompletions, Ticks

#: Orders (``Rule.kind``); those from ``QUEUES`` on have queues, those from ``PUBLISHED_QUEUES`` on a peer's.
FIRST, SMALLEST, SHORTEST, REMAINING, PUBLISHED_SHORTEST, ATTAINED, TURNS, PENDING_LONGEST, EXPECTED = range(
    9
)
NODE_SETS, QUEUES, GITTINS, PUBLISHED_QUEUES, PUBLISHED_GITTINS = range(9, 14)

#: Placements (``Rule.placing``): any devices; the fullest node that will do; the first one (published).
ANYWHERE, FULLEST, LOWEST = range(3)

#: By exact type: a class derived from one of these may do anything.
_KINDS: dict[type[Any], int] = {
    Fifo: FIRST,
    FitFirst: FIRST,
    SmallestFirst: SMALLEST,
    ShortestJob: SHORTEST,
    ShortestRemaining: REMAINING,
    ShortestRemainingService: REMAINING,
    PublishedShortest: PUBLISHED_SHORTEST,
    PublishedLongestPending: PENDING_LONGEST,
    PublishedExpected: EXPECTED,
    PublishedGandiva: NODE_SETS,
    LeastAttained: ATTAINED,
    RoundRobin: TURNS,
    TwoDas: QUEUES,
    TwoDGittins: GITTINS,
    PublishedDlas: PUBLISHED_QUEUES,
    PublishedGittins: PUBLISHED_GITTINS,
}
#: The others look at nodes, which is done only where nobody is suspended.
_PLACINGS: dict[type[Any], int] = {Count: ANYWHERE, Consolidated: FULLEST, PublishedYarn: LOWEST}


class Rule(NamedTuple):
    """A policy and its options in numbers; ``stale``: completions as in ``StaleCompletions``.

    ``sparing``: nobody is suspended within ``View.least_slice_s``; ``sums_waits``: ``promote_waits=all``.
    """

    kind: int
    placing: int
    strict: bool
    by_devices: bool
    promote: float
    quantum_s: float
    stale: bool
    sparing: bool
    sums_waits: bool


@dataclass(frozen=True, slots=True)
class Form:
    """The parameters of a compiled run besides the trace: policy, placement, speeds, cost.

    Attributes
    ----------
    limits
        Thresholds of the queues, or rows of sizes (``arrays.World.numbers``).
    samples, table
        Sampled services, ascending, and what an index looks up at them.
    """

    rule: Rule
    limits: Sequence[float] = ()
    samples: Sequence[float] = ()
    table: Sequence[float] = ()


def form_of(simulation: Simulation) -> Form | None:
    """Return ``simulation`` as numbers for compiled code; None if it cannot be compiled."""
    policy: Any = simulation.policy
    kind = _KINDS.get(type(policy))
    placing = None if kind is None else _placing(simulation)
    if (
        kind is None
        or placing is None
        or type(simulation) not in ((Ticks,) if kind == NODE_SETS else (Simulation, StaleCompletions))
        or type(simulation.speed) is not LinearSpeed
        or type(simulation.cost) not in (NoCost, FixedCost, MeasuredCost)
        or (simulation.keep_spans and (placing != ANYWHERE or kind == NODE_SETS))
        or not _costs_alike(simulation)
        or (kind == TURNS and len(set(simulation.trace.extras.get("weight", ()))) > 1)
    ):
        return None
    rule = Rule(
        kind,
        placing,
        getattr(policy, "strict", False),
        getattr(policy, "by_devices", type(policy) is ShortestRemainingService),
        float(getattr(policy, "promote", inf)),
        float(getattr(policy, "quantum_s", inf)),
        type(simulation) is StaleCompletions,
        getattr(policy, "sparing", False) and getattr(policy, "preemptive", False),
        getattr(policy, "promote_waits", "last") == "all",
    )
    limits = getattr(policy, "limits", ())
    if kind == GITTINS:
        index = GittinsIndex(simulation.view.knowledge.services() or yarn_services())
        return Form(rule, limits, index.services, index.sums)
    if kind == NODE_SETS:
        demands = sorted(set(simulation.trace.demand))
        return Form(rule, [demands.index(size) for size in SIZES if size in demands])
    if kind == EXPECTED:
        return Form(rule, limits, policy.services, policy.means)
    if kind == PUBLISHED_GITTINS:
        return Form(rule, limits, policy.index.services, policy.index.table)
    return Form(rule, limits)


def _costs_alike(simulation: Simulation) -> bool:
    """Return True if all jobs have the same switching cost.

    Slices are as long as the dearest one asks for.
    """
    if type(simulation.cost) is not MeasuredCost:
        return True
    trace = simulation.trace
    return len({simulation.cost.resume_s(Job(trace.spec(i), i)) for i in range(len(trace))}) == 1


def _placing(simulation: Simulation) -> int | None:
    """Return the number of the policy's placement. Return None if it cannot be compiled."""
    policy: Any = simulation.policy
    if type(policy) is PublishedGandiva:
        return ANYWHERE if set(simulation.trace.demand) <= set(SIZES) else None
    placing = _PLACINGS.get(type(policy.placement))
    if placing == ANYWHERE:
        return placing
    alike = len(set(simulation.cluster.node_sizes)) == 1
    return placing if alike and not getattr(policy, "preemptive", False) else None
