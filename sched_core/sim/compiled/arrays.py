"""Jobs as records, and everything else that changes as time passes, in arrays.

Few arrays hold everything: numba takes longer to compile the more of them every call passes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np

F = TypeVar("F", bound=Callable[..., Any])

#: Heaps: who waits, by key; what runs, by its end; who changes queue next; whose promotion wakes (published).
WAITING, ENDING, DUE, RISING = range(4)
#: Rows of ``World.slots``: the heaps; the running jobs, most urgent first; lists that last for one event, but
#: for ``TIED``, the jobs that end with the next arrival whatever happens before, and ``PENDING``, those that
#: wait in order of arrival (``lpjf``).
ORDER, FLIPPED, STARTED, SUSPENDED, JOINING, TIED, PENDING = range(4, 11)
#: Rows of ``World.nodes``: how many devices are free; the next node that is wholly its holder's, or -1.
FREE, NEXT = range(2)

#: A job: of ``SimJob`` and of its entry in the ranking. ``runs`` is the plan, ``running`` the engine's fact;
#: ``group`` is its row in ``World.groups``, ``at`` where it is in each heap, or -1; ``whole`` is the first of
#: the nodes that it has for itself, ``rest`` the one that it shares, or -1; ``after`` is the next job of
#: its node set (``node_sets.py``), which it joined when it ``started``.
#: ``own`` is its key while it is spared, ``keyed`` when a running job got its key. What is looked at of many
#: jobs in every event comes first: two lines of a processor's cache.
JOB = np.dtype(
    [("key", np.float64, (5,)), ("since", np.float64), ("executed", np.float64), ("service", np.float64)]
    + [(name, np.float64) for name in ("keyed", "duration", "base_service", "base_executed", "end")]
    + [(name, np.int32) for name in ("demand", "group", "level")]
    + [(name, np.bool_) for name in ("running", "runs", "touched", "sunk")]
    + [("at", np.int32, (4,))]
    + [(name, np.float64) for name in ("due", "submit", "resume", "born", "room", "fragmented", "lost")]
    + [(name, np.float64) for name in ("first", "finish", "contention", "switching", "entered", "started")]
    + [(name, np.float64) for name in ("waited", "spent")]
    + [("own", np.float64, (5,))]
    + [(name, np.int32) for name in ("preemptions", "promotions", "whole", "rest", "after")],
    align=True,
)
#: All jobs of one demand. ``room`` is the clock of ``jobs.wait_reasons.Waits`` that runs while that many
#: devices are free, since ``since`` if it runs now (``roomy``); ``start`` and ``filled`` say where in
#: ``slots`` a heap is; ``blocked``: none can be placed now. Three more records for the other heaps.
GROUP = np.dtype(
    [
        ("room", np.float64),
        ("since", np.float64),
        *((name, np.int64) for name in ("demand", "start", "filled", "sets", "wanted")),
        ("known", np.bool_),
        ("roomy", np.bool_),
        ("blocked", np.bool_),
    ],
    align=True,
)
#: Everything else: the policy in numbers (``rules.Rule``), and what changes as time passes. ``alert`` is when
#: the policy looks at the order again (las, rr), ``newest`` who came last, at ``newest_s`` (``EXPECTED``).
#: A slice lasts ``slice_s``; nobody who began less than ``least_s`` ago is suspended, before ``spared_s``.
#: ``expired``: running jobs have new keys, which are worked out when somebody asks (``Ranking.expire``); from
#: place ``fresh`` of the order on they have them. Keys grow by ``pace`` a second at most.
CLOCK = np.dtype(
    [
        (name, np.float64)
        for name in (
            *("promote", "quantum_s", "now", "wake", "job_s", "alert", "tied_s", "newest_s"),
            *("slice_s", "least_s", "spared_s", "pace"),
        )
    ]
    + [(name, np.int64) for name in ("kind", "placing", "queues", "samples", "groups", "capacity", "newest")]
    + [(name, np.int64) for name in ("arrived", "alive", "count", "free", "asked", "events", "turn")]
    + [(name, np.int64) for name in ("flipped", "started", "suspended", "tied", "pending", "node_size")]
    + [(name, np.int64) for name in ("sizes", "idle_nodes", "logged", "fresh")]
    + [
        (name, np.bool_)
        for name in ("strict", "by_devices", "stale", "was_crowded", "sparing", "sums_waits", "expired")
    ],
    align=True,
)


class World(NamedTuple):
    """The state of one compiled simulation, as arrays.

    Attributes
    ----------
    jobs, groups, clock
        Records; ``clock`` is a single one.
    slots
        Lists of jobs, shape ``(11, jobs)``.
    firsts
        By what the jobs of the heaps and of ``ORDER`` are ordered first, beside each other, so that most
        comparisons need not look at jobs (``ranking.first_of``); shape ``(5, jobs)``.
    nodes
        What each node has, shape ``(2, nodes)``; looked at where nodes matter only.
    numbers
        Thresholds of the queues; sampled services, ascending; what an index looks up at them. Or the sizes of
        jobs that have node sets, as rows of ``groups``, in the order in which they are walked.
    log
        ``clock.logged`` entries of who was started and released (``devices.LOG``); empty if nobody asks.
    """

    jobs: Any
    groups: Any
    clock: Any
    slots: Any
    firsts: Any
    nodes: Any
    numbers: Any
    log: Any


#: Nothing here allocates; counting references to the arrays would take a third of the time.
OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False}


def compiled(function: F) -> F:
    """Return ``function``, compiled when compiled code first calls it."""
    jit: Any = numba.njit  # Its annotations lack these options.
    jitted: F = jit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function)
    return jitted


def inlined(function: F) -> F:
    """Return ``function``, compiled into its callers.

    For a few lines in an inner loop, passing all arrays would take longer.
    """
    jit: Any = numba.njit
    jitted: F = jit(no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True, **OPTIONS)(function)
    return jitted


@inlined
def urgent(w: World, one: int, other: int) -> bool:
    """Return True if job ``one`` goes before ``other``: by key, column by column, then by number."""
    for column in range(5):
        if w.jobs[one].key[column] != w.jobs[other].key[column]:
            return bool(w.jobs[one].key[column] < w.jobs[other].key[column])
    return one < other
