"""Policies around another policy."""

from __future__ import annotations

from gpuslice.sched_core.policy import Guarantees, Named, Places, Policy, Queues, Shares


class Wrapper:
    """What a wrapped policy shows of itself, shown by the one around it."""

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
        """The placement that the policy asks, if any."""
        return self.policy.placement if isinstance(self.policy, Places) else None

    def level(self, job: str) -> int | None:
        """The queue of a job, if the policy has queues."""
        return self.policy.level(job) if isinstance(self.policy, Queues) else None

    @property
    def promotions(self) -> dict[int, int]:
        """Promotions by job number, if the policy counts them."""
        return dict(getattr(self.policy, "promotions", {}))

    @property
    def solver_version(self) -> str:
        """Which solver the policy uses; empty: none."""
        return str(getattr(self.policy, "solver_version", ""))

    @property
    def counters(self) -> dict[str, int]:
        """What the policy counted."""
        return dict(getattr(self.policy, "counters", {}))
