"""The arbiter: who is asked to bid, the auction, and what becomes of the leftovers.

Source: Themis (NSDI 2020), sections 3.3 and 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from random import Random

import msgspec

from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.policy import View

from .agent import Agent
from .auction import Award, auction
from .bids import Gang, Option
from .ways import gang_size


class Grant(msgspec.Struct, frozen=True):
    """Devices for a job, and the share of the lease it may keep them for."""

    job: Job
    devices: tuple[int, ...]
    share: float


class Contender(msgspec.Struct, frozen=True):
    """An agent and those of its jobs that ask for devices, most urgent first."""

    agent: Agent
    asking: tuple[Job, ...]


class Arbiter:
    """Offers devices to the apps that are worst off.

    Winning multiplies the value of an app by (age + wait + work) / (age + work), which tends to 1 with its
    age: a product of values would let the oldest wait for ever. So the app that is worst off is served first
    and pays nothing, and the rest is auctioned among the others. Elastic jobs of an app that is served
    without an auction get its equal part of the offer at most; what is left in the end they grow into.

    Parameters
    ----------
    fairness
        The filter f: the fraction 1 − f of the contenders, those of largest ρ, is asked to bid.
    bidders
        At most so many are asked, whatever f says; bounds the time of an auction.
    whole_leases
        What the hidden payment is taken from. True: devices, whole gangs at a time, as the paper has it;
        false: the length of the lease.
    seed
        Seed of the random order in which leftovers are given out.
    """

    def __init__(self, fairness: float, bidders: int, *, whole_leases: bool, seed: int) -> None:
        self._fairness = fairness
        self._bidders = bidders
        self._whole_leases = whole_leases
        self._random = Random(seed)
        #: Auctions held, and those whose search was cut short.
        self.auctions = 0
        self.inexact = 0

    def share_out(
        self, view: View, crowd_s: float, offer: FreeDevices, contenders: Sequence[Contender], wait_s: float
    ) -> list[Grant]:
        """Give away ``offer`` as far as any job can use it. Return the grants.

        Parameters
        ----------
        wait_s
            Time to the next big offer, for those that get nothing now.
        """
        ranked = sorted(
            contenders,
            key=lambda c: (
                -c.agent.rho(view, crowd_s),
                -1.0 / c.agent.nothing(view, crowd_s, wait_s),
                c.agent.start_s,
                c.asking[0].number,
            ),
        )
        asked = min(max(1, ceil((1.0 - self._fairness) * len(ranked) - 1e-9)), self._bidders)
        bidding, others = ranked[:asked], ranked[asked:]
        part = offer.total / len(ranked)
        grants = self._serve(view, crowd_s, offer, bidding[0], bidding[0].asking, wait_s, part)
        if len(bidding) > 1 and offer.total:
            grants += self._auction(view, crowd_s, offer, bidding[1:], wait_s)
        self._random.shuffle(others)
        granted = {grant.job.id for grant in grants}
        for contender in (*others, *bidding):
            asking = [job for job in contender.asking if job.id not in granted]
            while any(job.least <= offer.total for job in asking):
                taken = self._serve(view, crowd_s, offer, contender, asking, wait_s, part)
                if not taken:
                    break
                grants += taken
                asking = [job for job in asking if all(grant.job is not job for grant in taken)]
        agents = {job.id: contender.agent for contender in ranked for job in contender.asking}
        return _grown(grants, offer, agents) if offer.total else grants

    def _serve(
        self,
        view: View,
        crowd_s: float,
        offer: FreeDevices,
        contender: Contender,
        asking: Sequence[Job],
        wait_s: float,
        part: float,
    ) -> list[Grant]:
        """Give ``contender`` its best part of ``offer`` for the whole lease. Return the grants."""
        options = contender.agent.bid(view, crowd_s, offer, asking, wait_s, part, every_node=False).options
        if not options:
            return []
        best = max(options, key=lambda option: (option.value, option.size))
        return _settle(offer, [(gang, 1.0) for gang in best.gangs], asking)

    def _auction(
        self, view: View, crowd_s: float, offer: FreeDevices, bidding: Sequence[Contender], wait_s: float
    ) -> list[Grant]:
        bids = [c.agent.bid(view, crowd_s, offer, c.asking, wait_s) for c in bidding]
        verdict = auction([len(free) for free in offer.on_node], bids)
        self.auctions += 1
        self.inexact += not verdict.exact
        won: list[tuple[Gang, float]] = []
        for award in verdict.awards:
            won += self._after_payment(award)
        return _settle(offer, won, [job for c in bidding for job in c.asking])

    def _after_payment(self, award: Award) -> list[tuple[Gang, float]]:
        if award.option is None:
            return []
        if not self._whole_leases:
            return [(gang, award.fraction) for gang in award.option.gangs]
        return [(gang, 1.0) for gang in _kept(award.option, award.fraction)]


def _kept(option: Option, fraction: float) -> list[Gang]:
    """Return the first gangs of ``option`` that fit into ``fraction`` of its devices."""
    left = fraction * option.size + 1e-9
    kept: list[Gang] = []
    for gang in option.gangs:
        left -= gang_size(gang)
        if left < 0:
            break
        kept.append(gang)
    return kept


def _grown(grants: Sequence[Grant], offer: FreeDevices, agents: Mapping[str, Agent]) -> list[Grant]:
    """Add single devices to ``grants``, always to the smallest job that gains by one. Return the grants."""
    devices = {grant.job.id: grant.devices for grant in grants}
    growing = [grant.job for grant in grants if grant.job.least < grant.job.most]
    while growing and offer.total:
        job = min(growing, key=lambda job: len(devices[job.id]))
        if not agents[job.id].gains(job, len(devices[job.id]) + 1):
            growing.remove(job)
            continue
        more = _next_to(job, devices[job.id], offer)
        if more is None:
            growing.remove(job)
            continue
        offer.take((more,))
        devices[job.id] += (more,)
    return [Grant(grant.job, devices[grant.job.id], grant.share) for grant in grants]


def _next_to(job: Job, devices: Sequence[int], offer: FreeDevices) -> int | None:
    """Return a free device on a node of ``devices``.

    Else, if the job may be there, one of the node with most free devices.
    """
    nodes = [node for node in offer.cluster.nodes(devices) if offer.on_node[node]]
    if job.within and not nodes:
        return None
    node = nodes[0] if nodes else max(range(len(offer.on_node)), key=lambda node: len(offer.on_node[node]))
    return offer.on_node[node][0]


def _settle(offer: FreeDevices, won: Sequence[tuple[Gang, float]], jobs: Sequence[Job]) -> list[Grant]:
    """Choose the numbered devices for grants that name only nodes and counts.

    A job that won what it had keeps it, if free.
    """
    by_id = {job.id: job for job in jobs}
    node_of = offer.cluster.node_of
    grants: dict[str, Grant] = {}
    for (name, counts), share in won:
        job = by_id[name]
        wanted = sorted(node for node, count in counts for _ in range(count))
        if offer.has(job.placement) and sorted(node_of[device] for device in job.placement) == wanted:
            offer.take(job.placement)
            grants[name] = Grant(job, job.placement, share)
    for (name, counts), share in won:
        if name not in grants:
            devices = tuple(device for node, count in counts for device in offer.on_node[node][:count])
            offer.take(devices)
            grants[name] = Grant(by_id[name], devices, share)
    return list(grants.values())
