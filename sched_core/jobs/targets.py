"""Whether a job may have devices, and which: the ordered list of claims. The first that applies wins.

Whoever adds a reason to keep a job off devices, or to put it on others than the policy chose, adds an entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from .facts import Processes
from .states import JobState

Devices = tuple[int, ...]


class Claimed(Protocol):
    """The facts of a job that claims ask about."""

    state: JobState
    finishing: bool
    held: bool
    processes: Processes
    borrowed: Devices
    lent: bool
    running: bool
    placement: Devices

    @property
    def between_trainings(self) -> bool: ...


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
    applies: Callable[[Claimed], bool]
    devices: Callable[[Claimed], Devices]
    withdraws: bool = False


def _has_ended(job: Claimed) -> bool:
    return job.state.ended


def _has_made_its_steps(job: Claimed) -> bool:
    return job.finishing


def _is_held(job: Claimed) -> bool:
    return job.held


def _node_is_lost(job: Claimed) -> bool:
    return job.processes.cut_off


def _has_no_process(job: Claimed) -> bool:
    return job.between_trainings


def _is_tried(job: Claimed) -> bool:
    return bool(job.borrowed)


def _lends(job: Claimed) -> bool:
    return job.lent


def _is_planned(job: Claimed) -> bool:
    return job.running


def _nowhere(job: Claimed) -> Devices:
    return ()


def _of_trial(job: Claimed) -> Devices:
    return job.borrowed


def _of_plan(job: Claimed) -> Devices:
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


def claim_on(job: Claimed) -> Claim:
    """Return the claim that says which devices ``job`` is to have."""
    for claim in CLAIMS:
        if claim.applies(job):
            return claim
    return _NO_CLAIM
