"""Calls of a policy, which may be foreign code: its answer is checked, and its failures carry its name."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from gpuslice.errors import GpusliceError, where_raised

from .policy import Migrate, Plan, Policy, PolicyError, Start, Stop, Suspend, View

_REMEDY = "mend the policy, or choose another; docs/policies.md says what a plan is"


def ask_for_plan(policy: Policy, view: View) -> Plan:
    """Return the plan of ``policy`` for ``view``, checked to be one.

    The ledger checks later whether the plan is possible.

    Raises
    ------
    PolicyError
        If the policy raises, or returns something else than a plan. The message names the policy.
    """
    try:
        plan = policy.plan(view)
    except GpusliceError as error:
        if isinstance(error, PolicyError) and policy.name in error.message:
            raise
        raise PolicyError(f"policy {policy.name} failed: {error.message}", error.remedy) from error
    except Exception as error:
        raise PolicyError(f"policy {policy.name} failed: {where_raised(error)}", _REMEDY) from error
    if type(plan) is not Plan:
        returned = "None" if plan is None else f"a {type(plan).__name__}"
        raise PolicyError(f"policy {policy.name} returned {returned} instead of a Plan", _REMEDY)
    _check(plan, policy.name)
    return plan


def _check(plan: Plan, policy: str) -> None:
    """Raise ``PolicyError`` if a field of ``plan`` is not of its type."""
    wake_at_s: object = plan.wake_at_s
    if wake_at_s is not None and (not isinstance(wake_at_s, int | float) or isnan(wake_at_s)):
        raise PolicyError(f"policy {policy} asks to be woken at {wake_at_s!r}, which is no time", _REMEDY)
    decisions: object = plan.decisions
    if not isinstance(decisions, list | tuple | Sequence):  # (the first two are found out sooner)
        raise PolicyError(f"policy {policy} returned decisions that are no list: {decisions!r}", _REMEDY)
    for decision in decisions:
        if not isinstance(decision, Start | Suspend | Migrate | Stop) or not isinstance(decision.job, str):
            raise PolicyError(f"policy {policy} returned {decision!r}, which is no decision", _REMEDY)
        if isinstance(decision, Start | Migrate):
            devices: object = decision.devices
            # Not isinstance: True is no device, and a number of numpy cannot be written to the journal.
            if not isinstance(devices, tuple | list) or any(type(device) is not int for device in devices):
                raise PolicyError(
                    f"policy {policy} gives job {decision.job} devices {devices!r}, not a tuple of numbers",
                    _REMEDY,
                )
