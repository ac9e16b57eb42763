"""Policies around another policy."""

from __future__ import annotations

from gpuslice.sched_core.policy import Guarantees, Named, Places, Policy, Queues, Shares, keeps_to_nodes


class Wrapper:
    """Base of a policy around another one: it shows the inner policy's properties as its own."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.name = policy.name
        self.needs_durations = policy.needs_durations
        # Only what the policy has: worlds ask which methods there are.
        if isinstance(policy, Guarantees):
            self.guaranteed = policy.guaranteed
        if isinstance(policy, Shares):
            self.over_share = policy.over_share

    @property
    def placement(self) -> Named | None:
        """Return the wrapped policy's placement, if it has one."""
        return self.policy.placement if isinstance(self.policy, Places) else None

    @property
    def keeps_to_nodes(self) -> bool:
        """True if the wrapped policy leaves jobs on the nodes where they are to stay."""
        return keeps_to_nodes(self.policy)

    def level(self, job: str) -> int | None:
        """Return the queue of a job, if the policy has queues."""
        return self.policy.level(job) if isinstance(self.policy, Queues) else None

    @property
    def promotions(self) -> dict[int, int]:
        """Return promotions by job number, if the policy counts them."""
        return dict(getattr(self.policy, "promotions", {}))

    @property
    def solver_version(self) -> str:
        """Return the solver that the policy uses. Return "" for none."""
        return str(getattr(self.policy, "solver_version", ""))

    @property
    def counters(self) -> dict[str, int]:
        """Return the wrapped policy's counters."""
        return dict(getattr(self.policy, "counters", {}))
