"""Samples of throughput are counted between reports between which nobody came or left."""

from __future__ import annotations

import os
from itertools import pairwise

from gpuslice import wire
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.lifecycle.events import Event, Measured, Reported, Submitted
from gpuslice.sched_core.live.throughput_meter import ThroughputMeter
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.types import DeviceName

from ..driver import PROGRAM


class Metered:
    """One job on a slot of the host, and what is measured of it."""

    def __init__(self, *, pack: bool = True) -> None:
        options = {"quantum_s": "2", **({"pack": "true"} if pack else {})}
        self.core = Core([DeviceName("cpu", 0)], make_policy("rr", options))
        self.meter = ThroughputMeter(self.core)
        self.now_s = 0.0
        self.do(Submitted(JobSpec(id="a", submit_s=0.0), PROGRAM))
        self.say(wire.Hello(version=1, job="a", rank=0, world_size=1, pid=os.getpid()))
        self.say(wire.Resumed(epoch=1, boundary=0, stages_s={}))

    def do(self, event: Event) -> Measured | None:
        self.core.handle(event, self.now_s)
        return self.meter.note(event, self.now_s)

    def say(self, message: wire.FromAgent) -> Measured | None:
        return self.do(Reported("a", 0, message))

    def progress(self, now_s: float, step: int) -> Measured | None:
        self.now_s = now_s
        return self.say(wire.Progress(epoch=1, boundary=step, step=step))


def test_a_sample_begins_after_the_first_steps_and_is_long_enough() -> None:
    job = Metered()
    assert job.progress(1.0, 2) is None
    assert job.progress(1.5, 5) is None, "here it begins"
    assert job.progress(1.8, 30) is None, "it is too short"
    found = job.progress(2.5, 55)
    assert found is not None
    assert (found.job, found.beside, found.steps, found.seconds) == ("a", "", 50, 1.0)
    assert job.progress(3.6, 57) is None, "too few steps"
    longer = job.progress(4.5, 60)
    assert longer is not None
    assert (longer.steps, longer.seconds) == (5, 2.0)


def test_samples_get_longer_the_longer_a_company_lasts() -> None:
    job = Metered()
    job.progress(1.0, 5)
    moments = [moment for half in range(3, 60) if job.progress(moment := half / 2, 10 * half) is not None]
    lengths = [after - before for before, after in pairwise(moments)]
    assert moments[0] == 1.5
    assert lengths == sorted(lengths)
    assert lengths[-1] == 2.0


def test_how_busy_its_cores_were_is_measured_on_the_host() -> None:
    job = Metered()
    job.progress(1.0, 5)
    found = job.progress(2.0, 50)
    assert found is not None
    assert found.busy is not None
    assert found.busy >= 0.0


def test_nothing_is_measured_where_nobody_packs() -> None:
    job = Metered(pack=False)
    job.progress(1.0, 5)
    assert job.progress(3.0, 50) is None
