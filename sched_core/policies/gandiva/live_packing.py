"""Two jobs on one device, under any policy, where live measurements say that it pays.

A pair is a host, which the policy goes on scheduling, and a guest, which the policy does not see meanwhile:
it has its slices together with the host. Whether a pair pays is found out by alternating: a slice together,
then slices that each has alone, by the policy's own turns, until the interval decides (``interference``).
Jobs are alike if their ``model`` is (live: script and arguments); so a pair that was judged once needs no
trial, and a bad one is never tried again. A pair that does well is watched, and given up once it is worse
than slicing.

Source of the idea: Gandiva (OSDI 2018), sections 3.3 and 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, exp, inf
from pathlib import PurePath

from gpuslice.errors import ConfigError
from gpuslice.sched_core.interference import (
    MOST,
    WORSE,
    WORTH,
    Interval,
    Judgement,
    Prior,
    Sample,
    Verdict,
    judge,
    slowdown,
)
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.knowledge import NoThroughput, Throughput
from gpuslice.sched_core.policies.wrapper import Wrapper
from gpuslice.sched_core.policy import (
    Changes,
    Decision,
    Guarantees,
    Migrate,
    PackVerdict,
    Plan,
    Policy,
    Start,
    Suspend,
    View,
)

#: A slice together ends after so many of its length if there is no sample of both by then.
_PATIENCE = 4
#: A job without a limit counts with so many times the most memory that it was seen to use.
_MEMORY_MARGIN = 1.25
#: From the end of a slice together until the policy sees the guest again, which is suspended by then.
_HAND_OVER_S = 0.05


class Pair:
    """A host and its guest: two jobs that share a device or are tried on one.

    Attributes
    ----------
    tried_until_s
        When the slice together of a trial ends at the latest; infinite if the pair is known to do well.
    samples
        How many of both there were when it began.
    """

    __slots__ = ("guest", "host", "samples", "tried_until_s")

    def __init__(self, host: Job, guest: Job, tried_until_s: float, samples: int) -> None:
        self.host = host
        self.guest = guest
        self.tried_until_s = tried_until_s
        self.samples = samples


class Packing(Wrapper):
    """A wrapper that puts pairs of jobs on one device. ``policy`` schedules each pair as one job.

    Only jobs of one device are paired; where its memory is known, only those that fit together. A job counts
    with its limit, and without one with the most that it was seen to use and a margin. Before it, or a job of
    its array, was measured, it is not packed; when it has grown out of the room, the pair ends.

    Parameters
    ----------
    policy
        Decides whose turn it is.
    slice_s
        How long a pair under trial is together at least.

    Attributes
    ----------
    verdicts
        What was found, the oldest first.
    """

    def __init__(self, policy: Policy, slice_s: float) -> None:
        if isinstance(policy, Guarantees):
            raise ConfigError(
                f"policy {policy.name} guarantees deadlines, which neighbours on a device would break",
                "leave out --pack",
            )
        super().__init__(policy)
        self._slice_s = slice_s
        self.verdicts: list[PackVerdict] = []
        #: The newest verdict by kinds of jobs.
        self._known: dict[frozenset[str], bool] = {}
        #: What profiles say, by the scripts of a job and of the one beside it.
        self.priors: Mapping[tuple[str, str], Prior] = {}
        self._throughput: Throughput = NoThroughput()
        self._jobs: dict[str, Job] = {}
        #: By host.
        self._pairs: dict[str, Pair] = {}
        #: Those that run and allow another on their device; who was a host goes on so until it is suspended.
        self._sharing: set[str] = set()
        #: Guests that are being suspended, to be scheduled by themselves again.
        self._returning: dict[str, Job] = {}
        #: Those that shared a device and have not been started since: the other may still be leaving it.
        self._former: set[str] = set()

    def slowdown(self, job: str) -> Interval | None:
        """Return how much slower ``job`` is beside its partner. Return None if alone or not known."""
        for pair in self._pairs.values():
            for one, other in ((pair.host, pair.guest), (pair.guest, pair.host)):
                if one.id == job:
                    return slowdown(*self._samples(one, other), self._prior(one, other))
        return None

    def plan(self, view: View) -> Plan:
        """Plan for single jobs and hosts as the policy does, then add the guests."""
        if view.changes.reset:
            self._reset(view)
        inner = self._inner
        self._throughput = view.throughput
        inner.follow(view)
        self._follow(view, inner.changes)
        self._readmit()
        decisions = self._separate(view)
        self._propose(view, inner.changes)
        plan = self.policy.plan(inner)
        inner.changes = Changes()
        self._accompany(plan.decisions, view)
        decisions += self._together(plan.decisions)
        return Plan(decisions, self._wake_at(plan.wake_at_s, view))

    def _reset(self, view: View) -> None:
        self._former |= self._sharing | {*self._returning, *(pair.guest.id for pair in self._pairs.values())}
        self._former &= {job.id for job in view.waiting()}
        self._jobs.clear()
        self._pairs.clear()
        self._returning.clear()
        self._inner = view.narrowed(view.cluster, self._jobs)
        first: dict[int, Job] = {}
        for job in view.jobs.values():
            host = first.setdefault(job.placement[0], job) if job.running else job
            if host is job:
                self._jobs[job.id] = job
            else:
                self._pairs[host.id] = Pair(host, job, view.now_s + self._slice_s, 0)
        self._sharing = set(self._pairs)

    def _follow(self, view: View, changes: Changes) -> None:
        """Note which jobs came and ended. A guest whose host has ended takes the host's place."""
        changes.succeeded += view.changes.succeeded
        for job in view.changes.finished:
            self._sharing.discard(job.id)
            self._former.discard(job.id)
            self._returning.pop(job.id, None)
            pair = self._pairs.pop(job.id, None)
            if self._jobs.pop(job.id, None) is not None and not changes.reset:
                changes.finished.append(job)
            for host, other in list(self._pairs.items()):
                if other.guest is job:
                    del self._pairs[host]
            if pair is not None:
                self._leave_behind(pair.guest, changes)
        if view.changes.reset:
            return
        for job in view.changes.arrived:
            self._admit(job, changes)
        if not changes.reset:
            changes.begun += [job for job in view.changes.begun if job.id in self._jobs]

    def _leave_behind(self, guest: Job, changes: Changes) -> None:
        if guest.running:  # policies do not know of newcomers that run: let it look at everything anew
            self._sharing.add(guest.id)
            self._jobs[guest.id] = guest
            self._inner.changes = self._inner.changes.outdated()
        else:
            self._admit(guest, changes)

    def _admit(self, job: Job, changes: Changes) -> None:
        self._jobs[job.id] = job
        if not changes.reset:
            changes.arrived.append(job)

    def _readmit(self) -> None:
        for job in [job for job in self._returning.values() if not job.running]:
            del self._returning[job.id]
            self._former.add(job.id)
            self._admit(job, self._inner.changes)

    def _separate(self, view: View) -> list[Decision]:
        """End the pairs that do not pay, and those whose slice together is over."""
        decisions: list[Decision] = []
        for pair in list(self._pairs.values()):
            if not _fit(pair.host, pair.guest, view):
                decisions += self._part(pair)
                continue
            trial = pair.tried_until_s < inf
            found = judge(
                [self._samples(*pair_of) for pair_of in _both(pair)],
                priors=[self._prior(*pair_of) for pair_of in _both(pair)],
                packed=not trial,
            )
            if found is not None and not trial and self._doubtful(pair, found):
                self._known.pop(_kinds(pair.host, pair.guest), None)  # another pair may be alike
                decisions += self._part(pair)
                continue
            if found is not None and found.verdict is not None:
                self._remember(pair, found)
                if found.verdict is Verdict.PACK:
                    pair.tried_until_s = inf
                    continue
            elif not trial or not self._tried(pair, view):
                continue
            decisions += self._part(pair)
        return decisions

    def _doubtful(self, pair: Pair, found: Judgement) -> bool:
        """Return True if a pair seems to have got worse, but its samples do not decide that."""
        return found.verdict is None and found.total.mean < WORSE and self._counts(pair)[1] >= MOST

    def _part(self, pair: Pair) -> list[Decision]:
        """End a pair. A running guest is suspended, and scheduled by itself from then on."""
        del self._pairs[pair.host.id]
        self._returning[pair.guest.id] = pair.guest
        return [Suspend(pair.guest.id)] if pair.guest.running else []

    def _tried(self, pair: Pair, view: View) -> bool:
        """Return True if this slice together has enough samples, or its time is over."""
        alone, together = self._counts(pair)
        return together >= max(alone, pair.samples + 1) or view.now_s >= pair.tried_until_s

    def _remember(self, pair: Pair, found: Judgement) -> None:
        together = found.verdict is Verdict.PACK
        self._known[_kinds(pair.host, pair.guest)] = together
        first, second = found.slowdowns
        names = (pair.host.id, pair.guest.id)
        self.verdicts.append(PackVerdict(names, together, (first, second), found.total))

    def _propose(self, view: View, changes: Changes) -> None:
        """Give running jobs a waiting job as guest, first those that are known to get along."""
        if changes.reset:
            return
        waiting = self._waiting()
        for host in [job for job in self._unpaired() if job.running]:
            self._give_guest(host, waiting, view, changes, trial=_trains(host, view))

    def _accompany(self, decisions: Sequence[Decision], view: View) -> None:
        """Give jobs that start now guests that are known to get along with them."""
        decided = {decision.job for decision in decisions}
        waiting = [job for job in self._waiting() if job.id not in decided]
        started = {decision.job for decision in decisions if isinstance(decision, Start)}
        for host in [job for job in self._unpaired() if job.id in started]:
            self._give_guest(host, waiting, view, self._inner.changes, trial=False)

    def _unpaired(self) -> list[Job]:
        return [job for job in self._jobs.values() if job.demand == 1 and job.id not in self._pairs]

    def _waiting(self) -> list[Job]:
        return [job for job in self._unpaired() if not job.running]

    def _give_guest(
        self, host: Job, waiting: list[Job], view: View, changes: Changes, *, trial: bool
    ) -> None:
        """Make one of ``waiting`` the guest of ``host``, if one may share its device.

        Without ``trial``, only if that is known to pay.
        """
        choices = [
            guest
            for guest in waiting
            if (trial or _kinds(host, guest) in self._known) and self._may_share(host, guest, view)
        ]
        if choices:
            guest = min(choices, key=lambda job: self._order(host, job))
            waiting.remove(guest)
            self._join(host, guest, view, changes)

    def _join(self, host: Job, guest: Job, view: View, changes: Changes) -> None:
        known = self._known.get(_kinds(host, guest), False)
        until_s = inf if known else view.now_s + _PATIENCE * view.slice_s(self._slice_s)
        pair = self._pairs[host.id] = Pair(host, guest, until_s, 0)
        pair.samples = self._counts(pair)[1]
        del self._jobs[guest.id]
        if guest in changes.arrived:
            changes.arrived.remove(guest)
        else:
            changes.finished.append(guest)

    def _order(self, host: Job, guest: Job) -> tuple[bool, float, float, int]:
        """Return the sort key of a guest: known pairs first, then by profile, then by how busy both are."""
        busy = self._throughput.busy(guest)
        known = self._known.get(_kinds(host, guest), False)
        priors = [self._prior(host, guest), self._prior(guest, host)]
        gain = sum(exp(prior.log) for prior in priors if prior is not None) if all(priors) else WORTH
        return not known, -gain, 1.0 if busy is None else busy, guest.number

    def _prior(self, job: Job, beside: Job) -> Prior | None:
        return self.priors.get((script_of(job.kind), script_of(beside.kind))) if self.priors else None

    def _may_share(self, host: Job, guest: Job, view: View) -> bool:
        """Return True if memory allows the pair, and it is known or may be tried now.

        A pair may be tried if both have trained alone since the last try.
        """
        if not _fit(host, guest, view) or not (guest.may_have(host.placement) or not host.running):
            return False
        known = self._known.get(_kinds(host, guest))
        if known is not None:
            return known
        alone, together = self._counts(Pair(host, guest, inf, 0))
        return guest.executed_s > 0 and (alone > together or alone >= MOST)

    def _counts(self, pair: Pair) -> tuple[int, int]:
        """Return the numbers of samples of a pair: alone and together."""
        found = [self._samples(*pair_of) for pair_of in _both(pair)]
        return min(len(alone) for alone, _ in found), min(len(together) for _, together in found)

    def _samples(self, job: Job, beside: Job) -> tuple[Sequence[Sample], Sequence[Sample]]:
        return self._throughput.samples(job, None), self._throughput.samples(job, beside)

    def _together(self, decisions: Sequence[Decision]) -> Iterator[Decision]:
        """Yield the policy's decisions, what follows from them for guests, and what pairs need besides."""
        decided: set[str] = set()
        for decision in decisions:
            decided.add(decision.job)
            pair = self._pairs.get(decision.job)
            if isinstance(decision, Start | Migrate) and (pair is not None or decision.job in self._former):
                self._former.discard(decision.job)
                self._sharing.add(decision.job)
                yield type(decision)(decision.job, decision.devices, shared=True)
                if pair is not None:
                    yield _place(pair.guest, decision.devices)
                continue
            yield decision
            if decision.job in self._sharing:
                self._sharing.discard(decision.job)
                self._former.add(decision.job)
            if pair is not None:  # its host waits from now on: whether it does, too, the policy is to say
                yield from self._part(pair)
        for pair in self._pairs.values():
            host = pair.host
            if host.id in decided or not host.running:
                continue
            if host.id not in self._sharing:
                self._sharing.add(host.id)
                yield Migrate(host.id, host.placement, shared=True)
            if not pair.guest.running:
                yield Start(pair.guest.id, host.placement, shared=True)

    def _wake_at(self, wake_s: float | None, view: View) -> float | None:
        times = [inf if wake_s is None else wake_s]
        times += [pair.tried_until_s for pair in self._pairs.values()]
        if self._returning:
            times.append(view.now_s + _HAND_OVER_S)
        earliest_s = min(times)
        return earliest_s if earliest_s < inf else None


def _fit(host: Job, guest: Job, view: View) -> bool:
    """Return True if the device's memory is enough for both jobs, as far as that is known."""
    needs = [_needs_bytes(job, view) for job in (host, guest)]
    return not view.device_memory_bytes or (all(needs) and sum(needs) <= view.device_memory_bytes)


def _needs_bytes(job: Job, view: View) -> int:
    """Return the memory that ``job`` counts with: its limit, or what it or its array was seen to use."""
    peak_bytes = job.peak_bytes or view.array_bytes.get(job.spec.array, 0)
    return job.spec.device_memory_bytes or ceil(peak_bytes * _MEMORY_MARGIN)


def script_of(command: str) -> str:
    """Return a script's name, without its folder, and its arguments.

    Profiles and jobs are matched by this.
    """
    script, _, arguments = command.partition(" ")
    return f"{PurePath(script).name} {arguments}".rstrip()


def _trains(job: Job, view: View) -> bool:
    return job.running and job.since_s < view.now_s


def _both(pair: Pair) -> tuple[tuple[Job, Job], tuple[Job, Job]]:
    return (pair.host, pair.guest), (pair.guest, pair.host)


def _kinds(first: Job, second: Job) -> frozenset[str]:
    return frozenset((first.kind, second.kind))


def _place(guest: Job, devices: tuple[int, ...]) -> Decision:
    return (Migrate if guest.running else Start)(guest.id, devices, shared=True)
