"""Whether a job may have devices, and which: the ordered list of claims. The first that applies wins.

Whoever adds a reason to keep a job off devices, or to put it on others than the policy chose, adds an entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .gang import Gang

Devices = tuple[int, ...]


class Claim(NamedTuple):
    """A rule that says which devices some jobs are to have.

    Attributes
    ----------
    name
        A name for people and tests.
    applies
        Returns True if the rule is about the job now.
    devices
        Returns the devices that the job is to have; empty: none.
    withdraws
        True if the policy is not to see the job, and the job has no part of its tenant's quota.
    """

    name: str
    applies: Callable[[Gang], bool]
    devices: Callable[[Gang], Devices]
    withdraws: bool = False


def _has_ended(job: Gang) -> bool:
    return job.state.ended


def _has_made_its_steps(job: Gang) -> bool:
    return job.finishing


def _is_held(job: Gang) -> bool:
    return job.held


def _node_is_lost(job: Gang) -> bool:
    return job.processes.cut_off


def _has_no_process(job: Gang) -> bool:
    return job.between_trainings


def _is_tried(job: Gang) -> bool:
    return bool(job.borrowed)


def _lends(job: Gang) -> bool:
    return job.lent


def _is_planned(job: Gang) -> bool:
    return job.running


def _nowhere(job: Gang) -> Devices:
    return ()


def _of_trial(job: Gang) -> Devices:
    return job.borrowed


def _of_plan(job: Gang) -> Devices:
    return job.placement


#: Who may have devices, and which. In this order: the end, the owner, lost nodes, trials, the policy.
CLAIMS = (
    Claim("it has ended", _has_ended, _nowhere, withdraws=True),
    Claim("it has made its steps", _has_made_its_steps, _nowhere, withdraws=True),
    Claim("its owner holds it", _is_held, _nowhere, withdraws=True),
    Claim("its node is lost", _node_is_lost, _nowhere, withdraws=True),
    Claim("it has no process", _has_no_process, _nowhere, withdraws=True),
    Claim("it is tried", _is_tried, _of_trial),
    Claim("it lends its devices", _lends, _nowhere),
    Claim("the policy chose it", _is_planned, _of_plan),
)
_NO_CLAIM = Claim("the policy did not choose it", bool, _nowhere)


def claim_on(job: Gang) -> Claim:
    """Return the claim that says which devices ``job`` is to have."""
    for claim in CLAIMS:
        if claim.applies(job):
            return claim
    return _NO_CLAIM
