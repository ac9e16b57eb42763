"""Arrays in the table of ``gpuslice ps``: one line for all jobs that were submitted together."""

from __future__ import annotations

from collections.abc import Mapping

from gpuslice.verbs import ArrayInfo

#: States in the order in which they are counted.
_ORDER = (
    *("running", "resuming", "starting", "suspending", "relaunching", "suspended", "queued"),
    *("failed", "cancelled", "succeeded"),
)
_ENDED = _ORDER[-3:]


def ended(array: ArrayInfo) -> bool:
    """Return True if all jobs of ``array`` have ended."""
    return set(array.states) <= set(_ENDED)


def state(array: ArrayInfo) -> str:
    """Return the first state in their order that a job of ``array`` is in."""
    return next(iter(_in_order(array.states)))


def progress(array: ArrayInfo) -> str:
    """Return how many jobs of ``array`` have ended."""
    over = sum(array.states.get(state, 0) for state in _ENDED)
    return f"{over} of {sum(array.states.values())} ended"


def counts(array: ArrayInfo) -> str:
    """Return how many jobs of ``array`` are in which state."""
    return ", ".join(f"{count} {state}" for state, count in _in_order(array.states).items())


def _in_order(states: Mapping[str, int]) -> dict[str, int]:
    return {state: states[state] for state in _ORDER if state in states}
