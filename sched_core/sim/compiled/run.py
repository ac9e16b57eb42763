"""Running a simulation compiled: from its trace to arrays, and from arrays to its outcome."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil
from typing import Any

import numba
import numpy as np
from numba.core import config

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.files import private_directory
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.sim.engine import Progress, Simulation
from gpuslice.sched_core.sim.interrupts import Interrupts
from gpuslice.sched_core.sim.model import NoCost
from gpuslice.sched_core.sim.outcome import Outcome

from .arrays import CLOCK, FREE, GROUP, JOB, OPTIONS, World
from .choice import kept_in
from .devices import HOLDING, LOG, Found, Held, assign
from .loop import MORE, STUCK, advance
from .node_sets import SET, Sets, advance_sets
from .rules import ATTAINED, NODE_SETS, Form

#: Between two looks at Ctrl-C and the progress bar.
_EVENTS = 20_000
#: Entries of the log beyond those that one event may need.
_LOGGED = 100_000


def _compiled(loop: Callable[..., int]) -> Any:
    """Return ``loop``, compiled at its first call and kept on disk if there is a place for it."""
    settings: Any = config
    usual, folder = settings.CACHE_DIR, kept_in()
    try:
        private_directory(folder.parent, option="XDG_CACHE_HOME", parents=True)
        settings.CACHE_DIR = str(folder)
        return numba.njit(cache=True, **OPTIONS)(loop)
    except (EnvironmentUnusableError, OSError, RuntimeError):
        return numba.njit(**OPTIONS)(loop)
    finally:
        settings.CACHE_DIR = usual


_ORDERS, _NODE_SETS, _ASSIGN = _compiled(advance), _compiled(advance_sets), _compiled(assign)


def run(simulation: Simulation, form: Form, progress: Progress | None = None) -> Outcome | None:
    """Return what ``simulation.run`` returns, to the last bit. Return None if that would end in an error.

    Interrupted by Ctrl-C, it returns what is known so far, likewise.
    """
    began_s = time.perf_counter()
    world = _world(simulation, form)
    clock = world.clock[0]
    sets = (_sets(world),) if form.rule.kind == NODE_SETS else ()
    loop = _NODE_SETS if sets else _ORDERS
    left: int | None = MORE
    holders = _Holders(simulation, world) if simulation.keep_spans else None
    with Interrupts() as interrupts:
        while left == MORE and not interrupts.came:
            left = interrupts.call(loop, world, *sets, _EVENTS)  # the first call compiles it
            if holders is not None:
                holders.read(simulation.outcome)
            if progress is not None:
                progress(int(clock["arrived"] - clock["alive"]), len(world.jobs))
    simulation.outcome.complete = not interrupts.came
    if left == STUCK:
        return None
    outcome = _told(simulation.outcome, world)
    outcome.wall_s = time.perf_counter() - began_s
    return outcome


def _world(simulation: Simulation, form: Form) -> World:
    """Return the arrays of a simulation before its first event."""
    trace, count = simulation.trace, len(simulation.trace)
    jobs = np.zeros(count, JOB)
    jobs["submit"] = jobs["since"] = jobs["entered"] = trace.submit_s
    jobs["duration"], jobs["demand"] = trace.duration_s, trace.demand
    if type(simulation.cost) is not NoCost:
        jobs["resume"] = [simulation.cost.resume_s(Job(trace.spec(i), i)) for i in range(count)]
    jobs["first"] = jobs["finish"] = np.nan
    jobs["started"] = jobs["end"] = jobs["due"] = np.inf
    demands, jobs["group"], members = np.unique(jobs["demand"], return_inverse=True, return_counts=True)
    jobs["at"] = jobs["whole"] = jobs["rest"] = -1
    groups = np.zeros(len(demands) + 3, GROUP)
    groups["demand"][: len(demands)] = demands
    groups["start"][1 : len(demands)] = np.cumsum(members[:-1])
    clock = np.zeros(1, CLOCK)
    for name, value in form.rule._asdict().items():
        clock[name] = value
    dearest_s, share = float(jobs["resume"].max(initial=0.0)), simulation.switch_share
    least_s = dearest_s / share if share else 0.0
    clock["least_s"], clock["spared_s"] = least_s, np.inf
    quantum_s = form.rule.quantum_s
    clock["slice_s"] = quantum_s * max(1, ceil(least_s / quantum_s))
    if form.rule.kind == ATTAINED:
        clock["pace"] = demands[-1] if form.rule.by_devices else 1
    clock["queues"] = clock["sizes"] = len(form.limits)
    clock["samples"] = len(form.samples)
    clock["groups"] = len(demands)
    clock["now"] = trace.submit_s[0]
    clock["free"] = clock["capacity"] = simulation.cluster.size
    clock["wake"] = clock["alert"] = np.inf
    clock["tied_s"] = clock["newest"] = -1
    nodes = np.zeros((2, len(simulation.cluster.node_sizes)), np.int32)
    nodes[FREE] = simulation.cluster.node_sizes
    clock["node_size"], clock["idle_nodes"] = nodes[FREE, 0], len(nodes[FREE])
    numbers = np.array([*form.limits, *form.samples, *form.table], np.float64)
    slots, firsts = np.zeros((11, count), np.int32), np.zeros((5, count))
    log = np.zeros(_LOGGED + 3 * simulation.cluster.size if simulation.keep_spans else 0, LOG)
    jobs, groups, clock, log = (array.view(np.recarray) for array in (jobs, groups, clock, log))
    return World(jobs, groups, clock, slots, firsts, nodes, numbers, log)


class _Holders:
    """Turns a compiled run's log of starts and stops into spans: which job held which devices when."""

    def __init__(self, simulation: Simulation, world: World) -> None:
        sizes = np.array(simulation.cluster.node_sizes)
        nodes = np.bincount(sizes)
        self._world = world
        self._demand = world.jobs["demand"].copy()
        self._held = Held(
            begins=np.cumsum(sizes) - sizes,
            node_of=np.repeat(np.arange(len(sizes)), sizes),
            free=np.ones(simulation.cluster.size, np.bool_),
            after=np.full(simulation.cluster.size, -1, np.int32),
            left=sizes.copy(),
            nodes=nodes,
            holdings=np.zeros(len(world.jobs), HOLDING).view(np.recarray),
        )

    def read(self, outcome: Outcome) -> None:
        """Add the spans that have ended since the last call."""
        log = self._world.log[: int(self._world.clock[0]["logged"])]
        ended = int(log["gives"].sum())
        devices = int(self._demand[log["job"][log["gives"]]].sum())
        found = Found(
            np.zeros(ended, np.int32),
            np.zeros(ended),
            np.zeros(ended),
            np.zeros(ended, np.int64),
            np.zeros(devices, np.int32),
        )
        _ASSIGN(self._held, self._demand, log, found)
        outcome.spans.extend(*found)
        self._world.clock["logged"] = 0


def _sets(world: World) -> Sets:
    """Return empty node sets, with room for as many as there can be."""
    most = 1 + world.nodes.shape[1]
    lists = np.zeros((len(world.groups), most), np.int32)
    noted = np.zeros(3 * most + len(world.jobs), np.int32)
    return Sets(np.zeros(most, SET).view(np.recarray), lists, noted)


def _told(outcome: Outcome, world: World) -> Outcome:
    """Copy the jobs' times and counts from the arrays to ``outcome``, and return it."""
    jobs = world.jobs
    for name in ("executed", "fragmented", "lost", "switching", "finish"):
        getattr(outcome, f"{name}_s")[:] = jobs[name]
    outcome.busy_s[:] = jobs["service"]
    outcome.service_s[:] = jobs["executed"] * jobs["demand"]
    outcome.first_start_s[:] = jobs["first"]
    outcome.contention[:] = jobs["contention"]
    outcome.preemptions[:] = jobs["preemptions"]
    if world.clock[0]["kind"] == NODE_SETS:  # As ``Ticks`` has it.
        outcome.first_start_s[:] = np.where(np.isfinite(jobs["started"]), jobs["started"], np.nan)
        outcome.preemptions[:] = 0
    outcome.promotions = {int(job): int(jobs["promotions"][job]) for job in np.nonzero(jobs["promotions"])[0]}
    outcome.events = int(world.clock[0]["events"])
    return outcome
