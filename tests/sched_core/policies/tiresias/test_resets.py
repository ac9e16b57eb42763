"""Queues whose world is shown anew: after a reset, and when a job comes back that was held."""

from __future__ import annotations

import numpy as np
import pytest

from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.job import Job, JobSpec
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policy import Changes, View

from .. import worlds
from ..worlds import Forgetful

#: Job 0 waits for long while the others come, and is promoted several times.
STARVED = [(0.0, 1, 30.0), (2.0, 1, 2.0), (4.0, 1, 2.0), (6.0, 1, 2.0), (8.0, 1, 2.0), (9.0, 1, 20.0)]


@pytest.mark.parametrize("waits", ["all", "last"])
@pytest.mark.parametrize("name", ["2das", "gittins"])
def test_a_reset_forgets_no_promotion_and_no_waiting(name, waits) -> None:
    options = {"thresholds": (2.0, 9.0), "promote": 2.0, "promote_waits": waits}
    whole = worlds.simulate(worlds.trace(*STARVED), make_policy(name, options), "1x1")
    again = worlds.simulate(worlds.trace(*STARVED), Forgetful(make_policy(name, options)), "1x1")
    assert whole.promotions[0] >= 2
    assert again.promotions == whole.promotions
    assert again.finish_s.tolist() == whole.finish_s.tolist()


def test_a_job_that_was_held_comes_back_with_its_promotion() -> None:
    """It attained 3 s before its promotion: what it attains since then counts, also when it comes back."""
    job = Job(JobSpec(id="a", submit_s=0.0), 0)
    policy = make_policy("2das", {"thresholds": (2.0,), "promote": 2.0})
    view = View(Cluster((1,)), {"a": job, "b": Job(JobSpec(id="b", submit_s=0.0), 1)})
    job.first_start_s, job.executed_s, job.service_s = 0.0, 3.0, 3.0
    job.since_s = 3.0
    policy.plan(view)
    assert policy.level("a") == 1
    view.now_s, view.changes = 9.0, Changes()
    policy.plan(view)
    assert (policy.promotions, policy.level("a")) == ({0: 1}, 0)
    del view.jobs["a"]
    view.changes.finished.append(job)
    policy.plan(view)
    view.jobs["a"], view.changes, view.now_s = job, Changes(), 10.0
    view.changes.arrived.append(job)
    policy.plan(view)
    assert policy.level("a") == 0


@pytest.mark.parametrize(("name", "options"), [("dlas", {"promote": 1.0}), ("gittins", {})])
def test_published_queues_survive_a_reset(name, options) -> None:
    """What they expected of entries that a reset forgot is never compared with the new ones."""
    rows = [(0.0, 1, 9000.0), (10.0, 1, 3500.0), (4000.0, 1, 3300.0), (7000.0, 1, 3300.0)]
    policy = Forgetful(make_policy(f"published-{name}", options))
    outcome = worlds.simulate(worlds.trace(*rows), policy, "1x1")
    assert not np.isnan(outcome.finish_s).any()
