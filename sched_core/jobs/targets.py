"""Whether a job may have devices, and which: the ordered list of claims. The first that applies wins.

Whoever adds a reason to keep a job off devices, or to put it on others than the policy chose, adds an entry.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple, Protocol

from .conditions import Conditions
from .facts import Keep, Processes, Verdict

Devices = tuple[int, ...]


class Claimed(Protocol):
    """The facts of a job that claims ask about."""

    verdict: Verdict
    finishing: bool
    held: bool
    shut_out: bool
    conditions: Conditions
    keep: Keep | None
    processes: Processes
    borrowed: Devices
    lent: bool
    running: bool
    placement: Devices
    lease: Devices


class Claim(NamedTuple):
    """A rule that says which devices some jobs are to have.

    Attributes
    ----------
    name
        A name for people and tests.
    applies
        Returns something true if the rule is about the job now. It is asked for every job at every event.
    devices
        Returns the devices that the job is to have; empty: none.
    withdraws
        True if the policy is not to see the job, and the job has no part of its tenant's quota.
    """

    name: str
    applies: Callable[[Claimed], object]
    devices: Callable[[Claimed], Devices]
    withdraws: bool = False


def _has_ended(job: Claimed) -> bool:
    return job.verdict.ended_s is not None


def _has_no_process(job: Claimed) -> bool:
    return job.processes.idle_since_s is not None and not job.lease


def _nowhere(job: Claimed) -> Devices:
    return ()


#: Who may have devices, and which. In this order: the end, the owner, the job's own time, silent nodes,
#: closed devices, trials, the policy.
CLAIMS = (
    Claim("it has ended", _has_ended, _nowhere, withdraws=True),
    Claim("it has made its steps", attrgetter("finishing"), _nowhere, withdraws=True),
    Claim("its owner holds it", attrgetter("held"), _nowhere, withdraws=True),
    Claim("it may not start yet", attrgetter("conditions.unmet"), _nowhere, withdraws=True),
    Claim("its node is silent", attrgetter("processes.cut_off"), attrgetter("lease"), withdraws=True),
    Claim("its devices are closed", attrgetter("shut_out"), _nowhere, withdraws=True),
    Claim("it is kept while no scheduler runs", attrgetter("keep"), _nowhere, withdraws=True),
    Claim("it has no process", _has_no_process, _nowhere, withdraws=True),
    Claim("it is tried", attrgetter("borrowed"), attrgetter("borrowed")),
    Claim("it lends its devices", attrgetter("lent"), _nowhere),
    Claim("the policy chose it", attrgetter("running"), attrgetter("placement")),
)
_NO_CLAIM = Claim("the policy did not choose it", bool, _nowhere)


#: The claims by what is asked of a job: looking up the names of fields takes longer than the questions.
_ASKED = tuple((claim.applies, claim) for claim in CLAIMS)


def claim_on(job: Claimed) -> Claim:
    """Return the claim that says which devices ``job`` is to have."""
    for applies, claim in _ASKED:
        if applies(job):
            return claim
    return _NO_CLAIM
