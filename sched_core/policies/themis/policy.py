"""Themis as a policy: leases, rounds of auctions, and a tuner that ends jobs early."""

from __future__ import annotations

from heapq import heappop, heappush
from math import floor
from typing import Literal

from gpuslice.errors import ConfigError
from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.policy import Decision, Migrate, Plan, Start, Stop, Suspend, View
from gpuslice.sched_core.slowdown import Slowdown

from .agent import Agent, Ideal
from .arbiter import Arbiter, Contender, Grant
from .tuner import Tuner, TunerKind

#: A lease is not cut so short that what is left of it is less than this share.
_SHORTEST = 0.05


class Themis:
    """Finish-time fairness ρ = T_sh / T_id by partial-allocation auctions (NSDI 2020).

    Leases end together, at multiples of ``lease_s``, so that gangs of every size find an offer that can hold
    them. What becomes free in between is auctioned at once, until the end of the round. An elastic job has as
    many devices as its app bids for and wins, between its least and its largest number, until its lease ends.

    Parameters
    ----------
    lease_s
        Length of a round, in seconds (section 5: 20 minutes).
    fairness
        The filter f: only the fraction 1 − f of apps with the largest ρ bids (0.8: section 8.4).
    tuner
        ``none``: an app is finished when all its jobs are; ``first``: with its first job, and the others are
        stopped; ``halving``: as ``first``, and the worse half is stopped at every rung.
    rung_s
        First rung of ``halving``, in seconds of progress; each further one is twice as far.
    payment
        What bidders pay with: ``lease`` shortens the lease, ``devices`` withholds whole gangs (the paper's).
    ideal
        T_id: ``share``: on 1/N of the devices; ``times_n``: N times the time on all of them (section 3.2),
        which is the same for apps that can use all, and undemanding for small ones.
    spread_slowdown
        S(G) of a gang that lies on more nodes than it must.
    bidders
        Most bidders of one auction.
    seed
        Seed of the random order in which leftovers are given out.
    """

    name = "themis"
    needs_durations = True

    def __init__(
        self,
        *,
        lease_s: float = 1200.0,
        fairness: float = 0.8,
        tuner: TunerKind = "none",
        rung_s: float = 600.0,
        payment: Literal["lease", "devices"] = "lease",
        ideal: Ideal = "share",
        spread_slowdown: float = 1.0,
        bidders: int = 8,
        seed: int = 0,
    ) -> None:
        if not lease_s > 0 or not 0 <= fairness <= 1 or bidders < 1:
            raise ConfigError(
                f"lease_s={lease_s}, fairness={fairness}, bidders={bidders} are not possible",
                "lease_s > 0, 0 <= fairness <= 1, bidders >= 1",
            )
        self._lease_s = lease_s
        self.arbiter = Arbiter(fairness, bidders, whole_leases=payment == "devices", seed=seed)
        self.agents: dict[str, Agent] = {}
        #: ∫ number of apps dt, and up to when.
        self._crowd_s = 0.0
        self._counted_s = 0.0
        self._slowdown = Slowdown(spread_slowdown)
        self._ideal: Ideal = ideal
        self._tuner = Tuner(tuner, rung_s)
        self._clear()

    def _clear(self) -> None:
        self._elastic: dict[str, Job] = {}
        self._lease_end_s: dict[str, float] = {}
        #: The same as (end, number, job), the first first; void if that is no longer the end of a lease.
        self._ends: list[tuple[float, int, str]] = []
        #: Who has devices, and what nobody has.
        self._running: dict[str, Job] = {}
        self._free: FreeDevices

    @property
    def counters(self) -> dict[str, int]:
        """Return the numbers of auctions, and of those whose search was cut short."""
        return {"auctions": self.arbiter.auctions, "auctions_inexact": self.arbiter.inexact}

    def plan(self, view: View) -> Plan:
        """Take in what happened, end leases that are over, and auction what is free."""
        decisions: list[Decision] = []
        stopped = self._follow(view)
        decisions += [Stop(job.id, "the tuner gave it up") for job in stopped]
        now_s = view.now_s
        waiting = [job for job in view.waiting() if job not in stopped]
        round_end_s = (floor(now_s / self._lease_s) + 1) * self._lease_s
        if not waiting and not self._could_grow():
            return Plan(decisions, round_end_s if self._tuner.watches else None)
        decisions += self._renew(view, self._ended(now_s), waiting, round_end_s)
        while self._ends and self._lease_end_s.get(self._ends[0][2]) != self._ends[0][0]:
            heappop(self._ends)
        return Plan(decisions, self._ends[0][0] if self._ends else round_end_s)

    def _ended(self, now_s: float) -> list[Job]:
        """Return the jobs whose leases are over, in order of arrival."""
        ended: dict[str, Job] = {}
        while self._ends and self._ends[0][0] <= now_s:
            end_s, _, name = heappop(self._ends)
            if self._lease_end_s.get(name) == end_s:
                ended[name] = self._running[name]
        return sorted(ended.values(), key=lambda job: job.number)

    def _lease(self, job: Job, end_s: float) -> None:
        self._lease_end_s[job.id] = end_s
        heappush(self._ends, (end_s, job.number, job.id))

    def _could_grow(self) -> bool:
        """Return True if a running job might be faster on more devices."""
        running = [job for job in self._elastic.values() if job.running]
        return any(self.agents[_app(job)].gains(job, len(job.placement) + 1) for job in running)

    def _renew(self, view: View, ended: list[Job], waiting: list[Job], round_end_s: float) -> list[Decision]:
        grants: dict[str, Grant] = {}
        resizing = any(job.least < job.most for job in ended)
        room = self._free.total + sum(len(job.placement) for job in ended)
        if resizing or (room and any(job.least <= room for job in waiting)):
            for job in ended:
                self._free.give(job.placement)
                del self._running[job.id]
            for agent in {_app(job): self.agents[_app(job)] for job in self._elastic.values()}.values():
                agent.learn_speeds(view)
            asking: dict[str, list[Job]] = {}
            for job in sorted([*ended, *waiting], key=lambda job: job.number):
                asking.setdefault(_app(job), []).append(job)
            contenders = [Contender(self.agents[app], tuple(jobs)) for app, jobs in asking.items()]
            wait_s = round_end_s - view.now_s
            shared = self.arbiter.share_out(view, self._crowd_s, self._free, contenders, wait_s)
            grants = {grant.job.id: grant for grant in shared}
            self._running |= {grant.job.id: grant.job for grant in shared}
        else:
            grants = {job.id: Grant(job, job.placement, 1.0) for job in ended}
        decisions: list[Decision] = []
        for job in ended:
            if job.id not in grants:
                decisions.append(Suspend(job.id))
                self._lease_end_s.pop(job.id, None)
        for grant in grants.values():
            self._lease(grant.job, self._until(view.now_s, round_end_s, grant.share))
            if not grant.job.running:
                decisions.append(Start(grant.job.id, grant.devices))
            elif grant.devices != grant.job.placement:
                decisions.append(Migrate(grant.job.id, grant.devices))
        return decisions

    def _until(self, now_s: float, round_end_s: float, share: float) -> float:
        """Return the end of a lease that was paid for ``share`` of the rest of the round."""
        end_s = now_s + max(share, _SHORTEST) * (round_end_s - now_s)
        return round_end_s if round_end_s - end_s < _SHORTEST * self._lease_s else end_s

    def _follow(self, view: View) -> list[Job]:
        """Update the agents with what has happened. Return the jobs that the tuner stops."""
        self._crowd_s += len(self.agents) * (view.now_s - self._counted_s)
        self._counted_s = view.now_s
        if view.changes.reset:
            self._start_again(view)
        for job in view.changes.finished:
            self._forget(job)
            if (agent := self.agents.get(_app(job))) is not None:
                agent.jobs.pop(job.id, None)
        # Only now: several jobs of an app may have finished at once.
        won = [agent for job in view.changes.succeeded if (agent := self.agents.get(_app(job))) is not None]
        stopped = [job for agent in won for job in self._tuner.succeeded(agent.jobs.values())]
        for job in view.changes.arrived:
            self._arrive(job, view)
        if self._tuner.watches:
            for agent in self.agents.values():
                stopped += self._tuner.worse_half(agent.app, list(agent.jobs.values()), view)
        stopped = list({job.id: job for job in stopped}.values())
        for job in stopped:
            self._forget(job)
            self.agents[_app(job)].jobs.pop(job.id, None)
        for job in (*view.changes.finished, *stopped):
            self._retire(_app(job))
        return stopped

    def _start_again(self, view: View) -> None:
        """Make the agents anew from all jobs. Apps keep their history."""
        self._clear()
        self._free = view.free()
        self._running = {job.id: job for job in view.running()}
        for job in self._running.values():
            self._lease(job, view.now_s)
        for agent in self.agents.values():
            agent.jobs.clear()
        for job in view.jobs.values():
            self._arrive(job, view)
        for app in list(self.agents):
            self._retire(app)

    def _forget(self, job: Job) -> None:
        if self._running.pop(job.id, None) is not None:
            self._free.give(job.placement)
        self._lease_end_s.pop(job.id, None)
        self._elastic.pop(job.id, None)

    def _arrive(self, job: Job, view: View) -> None:
        app = _app(job)
        if app not in self.agents:
            self.agents[app] = Agent(
                app,
                job.spec.submit_s,
                self._tuner.goal,
                self._slowdown,
                self._crowd_s,
                self._ideal,
                seen_s=view.now_s,
            )
        self.agents[app].add(job, view)
        if job.least < job.most:
            self._elastic[job.id] = job

    def _retire(self, app: str) -> None:
        if app in self.agents and not self.agents[app].jobs:
            self._tuner.forget(app)
            del self.agents[app]


def _app(job: Job) -> str:
    """Return the job's app. A job without one is an app of its own."""
    return job.spec.app or f"job {job.id}"
