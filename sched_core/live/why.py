"""Why a job does not train, as one sentence: the table of cases, and nothing else.

``why`` looks at ``Facts`` alone, so each case can be tested without a scheduler. ``blockers`` reads the facts
from the core. The first case that applies is the answer: what stops a job now comes before what would stop it
next. Each sentence begins with what is waited for, so that it can be cut at its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache

from gpuslice.config import format_size
from gpuslice.sched_core.jobs.states import JobState

from .wait_facts import Facts, Refusal, Use

#: The most names that are said of a list.
_MOST_NAMES = 3
_DAY_S = 86400.0


def why(facts: Facts) -> str | None:
    """Return why the job does not train, or what is wrong with it while it does. None if nothing is."""
    found = explain(facts)
    return None if found is None else found[1]


def explain(facts: Facts) -> tuple[str, str] | None:
    """Return the name of the case that applies, and its sentence. None if there is nothing to say."""
    for case in CASES:
        if (said := case(facts)) is not None:
            more = _unfit(facts) if case in _NAMING_UNFIT else ""
            return (case.__name__.strip("_"), said + more) if said else None
    return None


# The processes of the job.


def _ended(facts: Facts) -> str | None:
    if not facts.state.ended:
        return None
    return f"its processes are ending ({_so_far(facts)})" if facts.exists else ""


def _node_lost(facts: Facts) -> str | None:
    if facts.awaited:
        (node, for_s), *_ = facts.awaited
        what = "its processes are" if facts.exists else "its state is"
        left = f"waits for {span(facts.waits_s)} more" if facts.waits_s > 0 else "goes on without it soon"
        said = f"{what} on {node}, which has been silent for {span(for_s)}; {left} (--wait-for-node)"
        if facts.copy is None:
            return said
        return f"{said}; its copy on {facts.copy.node} is {span(facts.copy.for_s)} old"
    if not facts.lost_processes or not facts.exists:
        return None
    (node, for_s), *_ = facts.lost_processes
    return f"{node} has not answered for {span(for_s)}; its processes are there"


def _relaunching(facts: Facts) -> str | None:
    if facts.state is not JobState.RELAUNCHING:
        return None
    count = _count(len(facts.wanted), "device") if facts.wanted else "other devices"
    return f"its processes are ending, to be started for {count} ({_so_far(facts)})"


def _relocating(facts: Facts) -> str | None:
    if not facts.relocating or facts.kept:
        return None
    return (
        f"its processes{_on(facts.on)} are ending, to be started at {listed(facts.wanted) or 'other devices'}"
    )


def _kept(facts: Facts) -> str | None:
    if not facts.kept or facts.lease:
        return None
    return "kept for the next `gpuslice up`" + (": its processes are ending" if facts.relocating else "")


def _retries(facts: Facts) -> str | None:
    if facts.launched or facts.retry_s <= 0:
        return None
    return f"it is started again in {span(facts.retry_s)}; it failed: {facts.reason or 'no reason is known'}"


def _held(facts: Facts) -> str | None:
    if not facts.held or facts.lease:
        return None
    return f"held by its owner (`gpuslice resume {facts.id}`)"


def _begin(facts: Facts) -> str | None:
    if not facts.begin_unix_s:
        return None
    then = time.localtime(facts.begin_unix_s)
    shown = time.strftime("%H:%M" if facts.begins_s < _DAY_S else "%Y-%m-%d %H:%M", then)
    return f"begins at {shown}, in {span(facts.begins_s)} (--begin)"


def _after(facts: Facts) -> str | None:
    if not facts.after:
        return None
    return f"waits until {listed(facts.after)} (--after)"


def _quota(facts: Facts) -> str | None:
    quota = facts.quota
    if quota is None or (facts.absent and facts.launched):
        return None
    if quota.kind == "first":
        said = f"array {quota.name} starts with one job, to learn what memory its jobs need (--memory)"
        return f"{said}: {listed(quota.inside or (quota.first,))}"
    most = f"{quota.limit} jobs at once" if quota.kind == "array" else _count(quota.limit, "device")
    said = f"{quota.kind} {quota.name} has {quota.used} of {most}"
    if quota.inside:
        said += f", for {listed(quota.inside)}"
    if quota.used + quota.part > quota.limit:
        return said if quota.used == quota.limit else f"{said}; it needs {quota.part}"
    return f"{said}; {quota.first} is before it"


def _not_started(facts: Facts) -> str | None:
    """Return why a job's processes are not started while devices are free; None if that is not the case."""
    if facts.launched or len(facts.free) < facts.demand:
        return None
    if facts.started_before:
        others = facts.started_before
        return f"its process is not started yet: {listed(others)} {_are(others)} before it"
    return f"its process is not started yet: policy {facts.policy} takes others first"


def _starting(facts: Facts) -> str | None:
    if not facts.launched or not facts.absent or facts.idle:
        return None
    if facts.ranks == 1:
        said = f"its process is starting{_on(facts.on)}"
    elif len(facts.absent) == facts.ranks:
        said = f"its {facts.ranks} processes are starting{_on(facts.on)}"
    else:
        rank = "rank" if len(facts.absent) == 1 else "ranks"
        said = f"{rank} {listed([str(number) for number in facts.absent])} of {facts.ranks} did not come yet"
    percent = f", {100 * facts.arrived_bytes // facts.state_bytes} %" if facts.arrived_bytes else ""
    size = f" ({format_size(facts.state_bytes)}{percent})" if facts.state_bytes else ""
    brought = f", its state{size} comes from {facts.state_from}" if facts.state_from else ""
    return f"{said}{brought} ({_so_far(facts)})"


def _stranded(facts: Facts) -> str | None:
    if not facts.stranded:
        return None
    return f"its state cannot be brought from {facts.state_from or 'where it is'} now ({_so_far(facts)})"


def _between(facts: Facts) -> str | None:
    if not facts.idle:
        return None
    kept = f" and keeps {listed(facts.lease)}" if facts.lease else ""
    return f"between two trainings: no process of it trains{kept} ({_so_far(facts)})"


def _ending(facts: Facts) -> str | None:
    if not facts.ending:
        return None
    return "its training has ended; its command goes on" if not facts.exists else "its training has ended"


# A job that has devices.


def _coming(facts: Facts) -> str | None:
    if facts.state not in (JobState.STARTING, JobState.RESUMING):
        return None
    if (refused := facts.resume_refused) is not None:
        return f"its resume on {listed(facts.lease)} was refused: {_again(refused)}"
    if facts.late:
        return f"it did not come to {listed(facts.lease)} in time ({_so_far(facts)})"
    what = "its process goes to" if facts.state is JobState.STARTING else "its state comes back to"
    return f"{what} {listed(facts.lease)} ({_so_far(facts)})"


def _leaving(facts: Facts) -> str | None:
    if facts.state is not JobState.SUSPENDING:
        return None
    cause = (
        "all its steps are made" if facts.finishing else "its owner holds it" if facts.held else ""
    ) or "".join(facts.closed[:1])
    cause = f"{cause}: it" if cause else "it"
    if facts.stuck:
        return f"{cause} is to stop; no boundary {facts.stuck} ({_so_far(facts)})"
    return f"{cause} stops at its next boundary ({_so_far(facts)})"


def _stays(facts: Facts) -> str | None:
    if facts.state is not JobState.RUNNING or facts.suspend_refused is None:
        return None
    return f"its suspend was refused: {_again(facts.suspend_refused)}"


def _stuck(facts: Facts) -> str | None:
    if facts.state is not JobState.RUNNING or not facts.stuck:
        return None
    return f"no boundary {facts.stuck}"


def _unleased(facts: Facts) -> str | None:
    if facts.state is not JobState.RUNNING or not facts.unleased:
        return None
    return f"{facts.unleased} without a lease: it cannot be suspended"


def _late(facts: Facts) -> str | None:
    if facts.state is not JobState.RUNNING or not facts.late:
        return None
    times = "" if facts.late == 1 else f", {facts.late} times in a row"
    return f"it did not do in time what it was told{times}; it keeps {listed(facts.lease)}"


def _sets_up(facts: Facts) -> str | None:
    if facts.state is not JobState.RUNNING:
        return None
    return "" if facts.trains else f"it sets up on {listed(facts.lease)}: no step yet ({_so_far(facts)})"


# A job without devices whose processes are there.


def _trial(facts: Facts) -> str | None:
    if not facts.trial_waits:
        return None
    if not facts.tried:
        return f"waits for {_count(facts.demand, 'device')} to be tried on; none can be borrowed"
    jobs = sorted({job for use in facts.tried for job in use.jobs})
    devices = [use.device for use in facts.tried]
    return f"waits for its trial: {listed(jobs)} {_are(jobs)} tried on {listed(devices)}"


def _lent(facts: Facts) -> str | None:
    if not facts.lent_to:
        return None
    return f"its devices are lent to {listed(facts.lent_to)} for a trial"


def _blocked(facts: Facts) -> str | None:
    """Return why a job that was given devices does not enter them yet. None if it was given none."""
    if not facts.wanted:
        return None
    if facts.blocked is not None:
        device, job, said = facts.blocked
        return f"waits for {device}, which {job} still uses: {said or 'it trains until its next boundary'}"
    return f"its process goes to {listed(facts.wanted)}"


def _shut_out(facts: Facts) -> str | None:
    if not facts.shut_out or facts.lease:
        return None
    return f"waits for {_count(facts.demand, 'device')}: {listed(facts.closed)}"


def _policy_fails(facts: Facts) -> str | None:
    if not facts.policy_error:
        return None
    again = "at the next event" if facts.policy_again_s is None else f"in {span(facts.policy_again_s)}"
    return f"policy {facts.policy} failed and is asked again {again}: {facts.policy_error}"


def _bound(facts: Facts) -> str | None:
    if not facts.bound_to:
        return None
    devices = listed([use.device for use in facts.bound_to])
    jobs = sorted({job for use in facts.bound_to for job in use.jobs})
    return f"its state can be only on {devices}, which {listed(jobs)} {_have(jobs)}"


def _too_few(facts: Facts) -> str | None:
    if facts.size >= facts.demand:
        return None
    said = f"needs {_count(facts.demand, 'device')} and there {_is(facts.size)} {facts.size}"
    if not facts.lost:
        return said
    return f"{said}: {facts.lost[0].node} has not answered for {span(facts.lost[0].for_s)}"


def _share(facts: Facts) -> str | None:
    if not facts.over_share:
        return None
    return f"tenant {facts.tenant} has its share of policy {facts.policy}"


def _taken(facts: Facts) -> str | None:
    if len(facts.free) >= facts.demand:
        return None
    where = _on(listed(facts.within))
    parts = [f"waits for {_count(facts.demand, 'device')}{where}", *_uses(facts.taken)]
    if facts.free:
        parts.append(f"only {listed(facts.free)} {_is(len(facts.free))} free")
    parts += facts.closed[:_MOST_NAMES]
    if facts.memory is not None:
        needs, device, left = facts.memory
        parts.append(f"memory: needs {format_size(needs)}, {device} has {format_size(left)} left")
    if facts.outranked:
        jobs = "1 job has" if facts.outranked == 1 else f"{facts.outranked} jobs have"
        parts.append(f"{jobs} a higher priority")
    if facts.queued_before:
        jobs = "1 job is" if facts.queued_before == 1 else f"{facts.queued_before} jobs are"
        parts.append(f"{jobs} before it in policy {facts.policy}")
    if facts.policy_again_s is not None:
        parts.append(f"policy {facts.policy} decides again in {span(facts.policy_again_s)}")
    return "; ".join(parts)


def _not_chosen(facts: Facts) -> str | None:
    """Return a sentence on a job for which there is room: only the policy knows why it waits."""
    if facts.computes:
        return f"policy {facts.policy} computes its plan"
    said = f"policy {facts.policy} has not chosen it yet; {listed(facts.free)} {_is(len(facts.free))} free"
    if facts.policy_again_s is None:
        return said
    return f"{said}; it decides again in {span(facts.policy_again_s)}"


#: The cases, in the order in which they are looked at. An empty sentence: there is nothing to say.
CASES: tuple[Callable[[Facts], str | None], ...] = (
    *(_ended, _node_lost, _relaunching, _relocating),
    *(_between, _coming, _leaving, _stays, _stuck, _unleased, _late, _sets_up),
    *(_kept, _held, _begin, _after, _retries, _shut_out, _quota, _stranded, _starting, _ending),
    *(_lent, _blocked, _trial, _policy_fails, _bound, _too_few, _share, _not_started, _taken, _not_chosen),
)


#: The cases in which it is said on which nodes the job cannot be.
_NAMING_UNFIT = (_starting, _too_few, _not_started, _taken, _not_chosen)


def _unfit(facts: Facts) -> str:
    unfit = "".join(f"; {node} cannot start it: {reason}" for node, reason in facts.not_for)
    return unfit + "".join(f"; {node} has {reason}" for node, reason in facts.no_room)


# Words.


def span(seconds: float) -> str:
    """Return a time for people: ``0.4 s``, ``41 s``, ``3 min``, ``1.2 h``."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def listed(names: Sequence[str]) -> str:
    """Return ``a``, ``a and b``, ``a, b and c`` or ``a, b, c and 4 more``."""
    shown = list(names[:_MOST_NAMES])
    if len(names) > _MOST_NAMES:
        shown.append(f"{len(names) - _MOST_NAMES} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


@lru_cache(16)
def _uses(taken: tuple[Use, ...]) -> list[str]:
    """Return which jobs have the ``taken`` devices, in words: devices in use first, then reserved ones."""
    said = []
    for used, verb in ((True, "used by"), (False, "reserved for")):
        devices = [use.device for use in taken if use.used is used]
        jobs = sorted({job for use in taken if use.used is used for job in use.jobs})
        if devices:
            said.append(f"{listed(devices)} {_is(len(devices))} {verb} {listed(jobs)}")
    return said


def _again(refusal: Refusal) -> str:
    return f"{refusal.error or 'no reason was given'}; tried again in {span(refusal.again_s)}"


def _so_far(facts: Facts) -> str:
    return f"{span(facts.for_s)} so far"


def _on(node: str) -> str:
    return f" on {node}" if node else ""


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s"


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def _are(names: Sequence[str]) -> str:
    return _is(len(names))


def _have(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"
