"""Time in leases: what jobs need before their deadlines, and a greedy plan of who holds which lease.

Source: Chronus (SoCC 2021), section 4.2. A lease is a slot in which a job holds its devices exclusively; the
leases of one job need not follow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil, floor, inf

import msgspec


class Level(msgspec.Struct, frozen=True):
    """One step of a soft deadline: the leases that a job needs to meet it, and the reward.

    Attributes
    ----------
    before
        The leases to have are among the first ``before`` of the plan.
    leases
        How many of them are needed.
    value
        The reward for meeting it.
    """

    before: int
    leases: int
    value: float


class Need(msgspec.Struct, frozen=True):
    """The devices that a job needs for some leases, and the deadlines it can meet, most rewarding first."""

    job: str
    devices: int
    levels: tuple[Level, ...]


class LeasePlan(msgspec.Struct, frozen=True):
    """Leases held by each job that meets a deadline, and the sum of rewards."""

    slots: dict[str, tuple[int, ...]]
    reward: float


def need_of(
    job: str,
    devices: int,
    work_s: float,
    deadlines: Iterable[tuple[float, float]],
    *,
    lease_s: float,
    horizon: int,
) -> Need:
    """Return the leases that a job needs for ``work_s`` seconds of remaining work.

    Parameters
    ----------
    deadlines
        (seconds from the start of the plan, value) pairs.
    horizon
        Leases that a plan looks ahead. What can be done after it and before a deadline is left out.
    """
    if work_s == inf:
        return Need(job, devices, ())
    leases = ceil(work_s / lease_s - 1e-9)
    levels = []
    for until_s, value in deadlines:
        before = floor(until_s / lease_s + 1e-9)
        if before >= leases:
            levels.append(Level(min(before, horizon), max(0, leases - max(0, before - horizon)), value))
    levels.sort(key=lambda level: (-level.value, level.before))
    return Need(job, devices, tuple(levels))


class Claim(msgspec.Struct, frozen=True):
    """Work of a job that must be done by some time: seconds on so many devices."""

    devices: int
    work_s: float
    within_s: float


def overbooked(claims: Iterable[Claim], capacity: int) -> bool:
    """Return True if some deadline cannot be met by any plan, because too much work is due before it.

    A plan looks ahead to its horizon only; this sees beyond it.
    """
    due = 0.0
    for claim in sorted(claims, key=lambda claim: claim.within_s):
        due += claim.devices * claim.work_s
        if due > capacity * claim.within_s:
            return True
    return False


def meets(plan: LeasePlan, needs: Sequence[Need], capacity: int) -> bool:
    """Return True if all ``needs`` meet a deadline with the leases that ``plan`` gives them."""
    used: dict[int, int] = {}
    for need in needs:
        slots = plan.slots.get(need.job, ())
        if not any(sum(slot < level.before for slot in slots) >= level.leases for level in need.levels):
            return False
        for slot in slots:
            used[slot] = used.get(slot, 0) + need.devices
    return all(devices <= capacity for devices in used.values())


def greedy_plan(needs: Sequence[Need], capacity: int, *, late: bool = False) -> LeasePlan:
    """Return the best of several plans that pack jobs into leases one by one, best level first.

    ``late`` packs the latest leases before the deadline instead of the earliest.
    """
    best = LeasePlan({}, 0.0)
    if any(need.levels for need in needs):
        for order in _ORDERS:
            ranked = sorted(((order(need), need.job, need) for need in needs), key=lambda item: item[:2])
            plan = _packed([need for _, _, need in ranked], capacity, late=late)
            if plan.reward > best.reward or not best.slots:
                best = plan
            if best.reward >= most_reward(needs):
                break
    return best


def most_reward(needs: Iterable[Need]) -> float:
    """Return the largest sum of rewards that all needs could have together."""
    return sum(need.levels[0].value for need in needs if need.levels)


def _packed(needs: Iterable[Need], capacity: int, *, late: bool) -> LeasePlan:
    used: dict[int, int] = {}
    slots: dict[str, tuple[int, ...]] = {}
    reward = 0.0
    for need in needs:
        for level in need.levels:
            room = [slot for slot in range(level.before) if used.get(slot, 0) + need.devices <= capacity]
            if len(room) >= level.leases:
                first = len(room) - level.leases if late else 0
                slots[need.job] = tuple(room[first : first + level.leases])
                for slot in slots[need.job]:
                    used[slot] = used.get(slot, 0) + need.devices
                reward += level.value
                break
    return LeasePlan(slots, reward)


def _earliest(need: Need) -> float:
    return need.levels[0].before if need.levels else 0


def _tightest(need: Need) -> float:
    return need.levels[0].before - need.levels[0].leases if need.levels else 0


def _densest(need: Need) -> float:
    if not need.levels:
        return 0.0
    return -need.levels[0].value / max(1, need.devices * need.levels[0].leases)


def _largest(need: Need) -> float:
    return -need.devices


_ORDERS: tuple[Callable[[Need], float], ...] = (_earliest, _tightest, _densest, _largest)
