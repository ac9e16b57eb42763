"""Whether to run a simulation compiled. Imports no numba, which takes as long as a short run."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from math import inf
from pathlib import Path

from gpuslice.sched_core.sim.engine import Simulation

from .rules import ATTAINED, NODE_SETS, PUBLISHED_SHORTEST, REMAINING, TURNS, Form, form_of

#: A guess at what the engine proper takes for a job: an order that stays, one that shifts as jobs run,
#: and one by which jobs are suspended again and again (turns, promotions), in seconds.
_STAYS_S, _SHIFTS_S, _AGAIN_S = 60e-6, 150e-6, 5e-3
#: What loading compiled code takes, and compiling it.
_LOAD_S, _COMPILE_S = 1.0, 30.0


def worth_compiling(simulation: Simulation) -> Form | None:
    """Return the compiled form of ``simulation``. Return None if it cannot be compiled or would not gain."""
    form = form_of(simulation)
    if form is None:
        return None
    kind = form.rule.kind
    if kind in (ATTAINED, TURNS, NODE_SETS) or form.rule.promote < inf:
        job_s = _AGAIN_S
    else:
        job_s = _SHIFTS_S if kind in (REMAINING, PUBLISHED_SHORTEST) else _STAYS_S
    least_s = _LOAD_S if is_kept(form) else _COMPILE_S
    return form if job_s * len(simulation.trace) > least_s else None


def is_kept(form: Form) -> bool:
    """Return True if the compiled code for ``form`` is on disk already."""
    loop = "node_sets.advance_sets" if form.rule.kind == NODE_SETS else "loop.advance"
    return any(kept_in().glob(f"*/{loop}-*.nbi"))


@cache
def kept_in() -> Path:
    """Return the folder of compiled code, named after its sources and where they are.

    Numba itself looks at the contents of one of them only, and uses nothing that was compiled elsewhere.
    """
    name = hashlib.sha256(str(Path(__file__).parent).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        name.update(path.read_bytes())
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME", "/"), ".cache")
    return Path(base, "gpuslice", f"simulator-{name.hexdigest()[:16]}")
