"""Check that the plan of a policy can be carried out as a whole, by a trial on a copy of the ledger."""

from __future__ import annotations

from collections.abc import Mapping

from .ledger import J, Ledger, summary
from .policy import Migrate, Plan, PolicyError, Start, Stop, View


def verify(plan: Plan, view: View, ledger: Ledger, jobs: Mapping[str, J]) -> None:
    """Raise if ``plan`` is not possible for ``jobs``, which the policy saw in ``view``. Nothing is changed.

    Raises
    ------
    PolicyError
        If it is not. The message names the policy and the plan.
    """
    if plan.wake_at_s is not None and plan.wake_at_s <= view.now_s:
        raise PolicyError(f"policy {ledger.policy} asks at {view.now_s} to be woken at {plan.wake_at_s}")
    if not plan.decisions:
        return
    trial = ledger.copy()
    trial.check_names(plan)
    grants: list[tuple[Start | Migrate, J]] = []
    for decision in plan.decisions:
        running = None if isinstance(decision, Stop) else not isinstance(decision, Start)
        job = trial.check(jobs, decision.job, plan, running=running)
        if job.running:
            trial.release(job)
        if isinstance(decision, Start | Migrate):
            grants.append((decision, job))
    for grant, job in grants:
        trial.grant(job, grant.devices, shared=grant.shared, plan=plan)
        _verify_memory(trial, grant, plan, view.device_memory_bytes)


def _verify_memory(trial: Ledger, grant: Start | Migrate, plan: Plan, limit_bytes: int) -> None:
    """Raise ``PolicyError`` if jobs are put together that ask for more memory than a device has."""
    for device in grant.devices if limit_bytes and grant.shared else ():
        asked = sum(holder.spec.device_memory_bytes for holder in trial.holders(device))
        if asked > limit_bytes:
            raise PolicyError(
                f"policy {trial.policy} puts jobs on device {device} that ask for {asked} bytes of "
                f"its {limit_bytes}; the plan: {summary(plan)}"
            )
