"""Simulations as requests: everything that one run needs, in a form that other processes can take."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from gpuslice.errors import UsageError
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.options import nearest
from gpuslice.sched_core.placement.registry import make_placement
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.sim.compiled.choice import is_kept, worth_compiling
from gpuslice.sched_core.sim.compiled.rules import form_of
from gpuslice.sched_core.sim.cost import parse_cost
from gpuslice.sched_core.sim.day import Day
from gpuslice.sched_core.sim.engine import Progress, Simulation
from gpuslice.sched_core.sim.outcome import Outcome
from gpuslice.sched_core.sim.peer import parse_peer
from gpuslice.sched_core.sim.speed import parse_speed
from gpuslice.sched_core.switch_cost_model import SWITCH_SHARE
from gpuslice.sched_core.traces.day import Window
from gpuslice.sched_core.traces.trace import Trace

ENGINES = ("auto", "plain", "compiled")


@dataclass(frozen=True, slots=True)
class Request:
    """One simulation, as the command line states it.

    Attributes
    ----------
    policy, options
        Name and ``--set`` options; not used with ``peer``.
    placement, placement_options
        Likewise; ``None`` leaves the choice to the policy.
    cost
        ``none``, ``fixed:62s`` or a file.
    speed
        ``linear`` or a file.
    peer
        ``tiresias:SCHEDULE/SCHEME``, or ``None``.
    keep_spans
        Record who held which devices when.
    engine
        ``plain``, ``compiled`` (``compiled/``: orders; ``keep_spans`` by ``count``), or ``auto``: whichever
        takes less time. Results are the same.
    windows
        When devices are reserved, paused or drained.
    switch_share
        Part of the time that switching may take: slices are long enough for that; 0: as long as the policy
        says.
    """

    trace: Trace
    cluster: str
    policy: str = "2das"
    options: Mapping[str, object] = field(default_factory=dict)
    placement: str | None = None
    placement_options: Mapping[str, object] = field(default_factory=dict)
    cost: str = "none"
    speed: str = "linear"
    peer: str | None = None
    keep_spans: bool = False
    engine: str = "auto"
    switch_share: float = SWITCH_SHARE
    windows: tuple[Window, ...] = ()

    def prepare(self) -> Simulation:
        """Return the simulation. Raise ``UsageError`` for everything that is wrong with the request."""
        simulation = self._simulation(Cluster.parse(self.cluster))
        if self.engine not in ENGINES:
            raise UsageError(f"there is no engine {self.engine!r}", nearest(self.engine, ENGINES))
        if self.engine == "compiled" and form_of(simulation) is None:
            raise UsageError(
                f"{simulation.policy.name} cannot run compiled here",
                "leave out --engine; docs/simulate.md says what can",
            )
        return simulation

    def _simulation(self, cluster: Cluster) -> Simulation:
        day = bool(self.windows) or self.trace.has_conditions
        if day:
            _check_day(self, cluster)
        if self.peer is not None:
            return parse_peer(self.peer).prepare(self.trace, cluster, keep_spans=self.keep_spans)
        placement = make_placement(self.placement, self.placement_options) if self.placement else None
        policy = make_policy(self.policy, self.options, placement)
        cost, speed = parse_cost(self.cost), parse_speed(self.speed)
        if not 0 <= self.switch_share < 1:
            raise UsageError(
                f"--switch-share {self.switch_share} is not a share of the time",
                "give a number from 0 to below 1, such as 0.03",
            )
        assumed: dict[str, Any] = {
            "speed": speed,
            "cost": cost,
            "keep_spans": self.keep_spans,
            "switch_share": self.switch_share,
        }
        if day:
            return Day(self.trace, cluster, policy, windows=self.windows, **assumed)
        return Simulation(self.trace, cluster, policy, **assumed)


def _check_day(request: Request, cluster: Cluster) -> None:
    """Refuse what cannot be simulated together with conditions of jobs and closed devices.

    Raises
    ------
    UsageError
        If there is something. The message names it.
    """
    options, extras = request.options, request.trace.extras
    gandiva = [name for name in ("packing", "growing", "migration") if _is_on(options.get(name, "true"))]
    refused = {
        "--peer": request.peer is not None,
        "--engine compiled": request.engine == "compiled",
        "a --cluster of several nodes, racks or sockets": len(cluster.node_sizes) > 1
        or len(cluster.socket_sizes) > 1,
        f"--cost {request.cost}": request.cost != "none",
        f"--policy {request.policy}": request.policy in ("optimus", "slaq"),
        f"gandiva with {', '.join(gandiva)}": request.policy == "gandiva" and bool(gandiva),
        "--set pack=true": _is_on(options.get("pack", "false")),
        "the columns min_gpu and max_gpu": any(
            any(extras.get(field, ())) for field in ("least_devices", "most_devices")
        ),
    }
    for what, asked in refused.items():
        if asked:
            raise UsageError(
                f"conditions of jobs and --windows cannot be simulated with {what}",
                "docs/simulate.md (Days) says what can; leave out one of the two",
            )


def _is_on(value: object) -> bool:
    return str(value).lower() not in ("false", "0", "no", "off")


def run_one(
    request: Request, progress: Progress | None = None, compiling: Callable[[], None] | None = None
) -> Outcome:
    """Prepare and run one request. Return its outcome.

    Parameters
    ----------
    compiling
        Called before the simulator is compiled, which takes a while, unless it was before.

    Raises
    ------
    UsageError
        If the request is wrong or cannot be compiled as it asks.
    """
    simulation = request.prepare()
    if request.engine == "plain":
        return simulation.run(progress)
    form = form_of(simulation) if request.engine == "compiled" else worth_compiling(simulation)
    if form is None:
        return simulation.run(progress)
    if compiling is not None and not is_kept(form):
        compiling()
    from gpuslice.sched_core.sim.compiled.run import run  # Imports numba.

    outcome = run(simulation, form, progress)
    return simulation.run(progress) if outcome is None else outcome


def run_all(
    requests: Sequence[Request], workers: int, done: Callable[[int], None] | None = None
) -> list[Outcome]:
    """Run ``requests`` in up to ``workers`` processes. Return outcomes in the order of the requests.

    Interrupted by Ctrl-C, it returns what there is: fewer results, or incomplete ones.

    Parameters
    ----------
    done
        Called with the number of finished requests whenever one more is.
    """
    for request in requests:
        request.prepare()
    if workers <= 1 or len(requests) == 1:
        return list(_in_turn(requests, done))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(requests)), mp_context=context) as pool:
        # Workers inherit this: while they start and wait, Ctrl-C is kept for their first simulation.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        futures = [pool.submit(_run_in_worker, request) for request in requests]
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            for count, _ in enumerate(as_completed(futures), 1):
                if done is not None:
                    done(count)
        except KeyboardInterrupt:
            # From a terminal the workers got the same signal; they hand in what they know.
            for child in multiprocessing.active_children():
                if child.pid is not None:
                    os.kill(child.pid, signal.SIGINT)
            pool.shutdown(cancel_futures=True)
            futures = [f for f in futures if f.done() and not f.cancelled() and f.exception() is None]
    return [future.result() for future in futures]


class _Interrupt:
    """The handler of Ctrl-C in a worker process: it ends all of the worker's remaining runs."""

    came = False

    @classmethod
    def note(cls, signal_number: int, frame: object) -> None:
        """Handle the signal."""
        if not cls.came:
            cls.came = True
            raise KeyboardInterrupt


def _run_in_worker(request: Request) -> Outcome:
    signal.signal(signal.SIGINT, _Interrupt.note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        if _Interrupt.came:
            raise KeyboardInterrupt
        return run_one(request)
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _in_turn(requests: Sequence[Request], done: Callable[[int], None] | None) -> Iterator[Outcome]:
    for count, request in enumerate(requests, 1):
        outcome = run_one(request)
        yield outcome
        if not outcome.complete:
            return
        if done is not None:
            done(count)
