"""A job that obeys a scheduler: real scripts in their own processes, a real ROUTER socket here."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from gpuslice.agent.agent import Agent
from gpuslice.checkpoint.ramdisk.room_requests import request_room
from gpuslice.profiler.skew import measure_skew
from gpuslice.wire import (
    Bye,
    Hello,
    Overshot,
    Profiled,
    Progress,
    Resume,
    Resumed,
    Suspend,
    Suspended,
)

from ...patience import PATIENCE_S
from ..conftest import Workshop
from .scripted_scheduler import ENDLESS, TRAIN, ScriptedScheduler, end, ends_as_undisturbed, job


def test_the_first_boundary_is_told_without_waiting_for_a_heartbeat(
    workshop: Workshop, scheduler: ScriptedScheduler
) -> None:
    with job(workshop, scheduler, ENDLESS):
        scheduler.welcome()
        scheduler.grant(1)
        scheduler.hear(Progress, lambda progress: progress.boundary == 1)


def test_a_job_tells_once_what_its_optimizers_train(workshop: Workshop, scheduler: ScriptedScheduler) -> None:
    with job(workshop, scheduler, ENDLESS):
        scheduler.welcome()
        scheduler.grant(1)
        told = scheduler.hear(Profiled)
        sizes = [20 * 64, 64, 64, 64, 64 * 3, 3]
        assert (told.tensors, told.nbytes, told.largest_bytes) == (6, 4 * sum(sizes), 4 * sizes[0])
        parked = scheduler.park(1)
        assert (parked.route, parked.tensors > 6) == ("tensor", True)


def test_the_loss_that_a_script_reports_goes_with_its_heartbeats(
    workshop: Workshop, scheduler: ScriptedScheduler
) -> None:
    plain = "nn.functional.cross_entropy(model(x), y).backward()"
    assert plain in TRAIN
    reporting = "loss = nn.functional.cross_entropy(model(x), y); loss.backward(); gpuslice.report(loss=loss)"
    script = "import gpuslice\n" + TRAIN.replace(plain, reporting)
    with job(workshop, scheduler, ENDLESS, script=script):
        scheduler.welcome()
        scheduler.grant(1)
        told = scheduler.hear(Progress, lambda progress: progress.loss is not None)
        assert told.loss is not None
        assert 0.0 < told.loss < 20.0
        scheduler.hear(Progress, lambda progress: progress.loss not in (None, told.loss))


@pytest.mark.slow
def test_who_waits_for_a_lease_imports_meanwhile_what_optimizers_need(
    workshop: Workshop, scheduler: ScriptedScheduler
) -> None:
    script = "import sys, torch\nprint('torch._dynamo' in sys.modules)"
    with job(workshop, scheduler, "", script=script) as process:
        scheduler.welcome()
        for _ in range(8):  # heartbeats: four seconds
            scheduler.hear(Progress)
        scheduler.grant(1)
        scheduler.hear(Bye)
        code, out, _ = end(process)
    plain = workshop.python("train.py")
    assert (code, out, plain.stdout) == (0, "True\n", "False\n")


def test_a_job_is_moved_about_and_ends_with_the_same_digest(
    workshop: Workshop, scheduler: ScriptedScheduler
) -> None:
    with job(workshop, scheduler, ENDLESS) as process:
        hello = scheduler.welcome()
        assert (hello.job, hello.rank, hello.world_size, hello.boundary) == ("job", 0, 1, 0)
        assert (scheduler.rank, hello.pid) == ("job:0", process.pid)
        scheduler.say(Suspend(epoch=0, stop_at=1))  # it has no lease: stale
        scheduler.say_nonsense()
        assert scheduler.grant(1, "cpu:0").boundary == 0
        parked = scheduler.park(1)
        assert parked.nbytes > 0
        assert set(parked.stages_s) >= {"quiesce_s", "copy_out_s", "publish_s", "free_s"}
        scheduler.say(Resume(epoch=0, device="cpu:1"))  # stale: it stays parked
        resumed = scheduler.grant(2, "cpu:1")
        assert (resumed.epoch, resumed.boundary) == (2, parked.boundary)
        further = scheduler.stop(2, resumed.boundary + 5).boundary + 9
        scheduler.say(Resume(epoch=2, device="cpu:1"))  # the gang stops further on: once more, same lease
        scheduler.say(Suspend(epoch=2, stop_at=further))
        assert scheduler.hear(Resumed).epoch == 2
        assert scheduler.stop(2, further, said=True).boundary >= further
        scheduler.grant(3)
        scheduler.say(Suspend(epoch=2, stop_at=10**9))  # of the former lease: nothing happens
        scheduler.say(Suspend(epoch=3, stop_at=1))
        assert scheduler.hear(Overshot).boundary >= resumed.boundary
        assert "dropped what the scheduler sent" in ends_as_undisturbed(workshop, scheduler, process)


def make_room(workshop: Workshop) -> None:
    """Have the parked job's slot moved out of the RAM disk; it may just have said that it is parked."""
    ends_s = time.monotonic() + PATIENCE_S
    while not any(map(request_room, workshop.ramdisk.glob("job@*.r0"))):
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def test_a_parked_job_gives_its_room_away_and_goes_on_with_the_same_digest(
    workshop: Workshop, scheduler: ScriptedScheduler
) -> None:
    spill = workshop.directory / "spill"
    with job(workshop, scheduler, ENDLESS, "--spill-dir", str(spill)) as process:
        scheduler.welcome()
        assert scheduler.grant(1).stages_s == {}
        for epoch in (2, 3):
            scheduler.park(epoch - 1)
            make_room(workshop)
            assert list(spill.glob("*.gsnp"))
            assert not list(workshop.ramdisk.glob("*/*.gsnp"))
            assert scheduler.grant(epoch).stages_s["fetch_s"] > 0
            assert not list(spill.glob("*.gsnp"))
        ends_as_undisturbed(workshop, scheduler, process)


def test_a_snapshot_that_was_damaged_where_it_was_spilled_ends_the_job(
    workshop: Workshop, scheduler: ScriptedScheduler
) -> None:
    spill = workshop.directory / "spill"
    with job(workshop, scheduler, ENDLESS, "--spill-dir", str(spill)) as process:
        scheduler.welcome()
        scheduler.grant(1)
        scheduler.park(1)
        make_room(workshop)
        (path,) = spill.glob("*.gsnp")
        with path.open("r+b") as file:
            file.seek(5000)
            file.write(b"\xff\xfe")
        scheduler.say(Resume(epoch=2, device="cpu"))
        code, _, err = end(process)
    assert code == 4
    assert ".r0.A.gsnp: its header is damaged" in err


def test_the_scheduler_may_die_and_come_back(
    workshop: Workshop, scheduler: ScriptedScheduler, tmp_path: Path
) -> None:
    with job(workshop, scheduler, ENDLESS) as process:
        scheduler.welcome()
        scheduler.grant(1)
        parked = scheduler.park(1)
        scheduler.close()
        second = ScriptedScheduler(tmp_path)
        try:
            assert second.welcome().boundary == parked.boundary
            assert second.hear(Suspended) == parked  # how it stands
            second.grant(2)
            running = second.hear(Progress, lambda progress: progress.boundary > parked.boundary)
            assert running.epoch == 2
        finally:
            second.close()
        third = ScriptedScheduler(tmp_path)
        try:
            assert third.welcome().boundary > parked.boundary  # it has run on meanwhile
            process.send_signal(signal.SIGTERM)
            assert end(process)[0] == -signal.SIGTERM
        finally:
            third.close()


def test_a_refused_suspend_is_reported_and_the_job_runs_on(
    workshop: Workshop, scheduler: ScriptedScheduler
) -> None:
    with job(workshop, scheduler, ENDLESS, "--ramdisk-limit", "1k"):
        scheduler.welcome()
        scheduler.grant(1)
        refused = scheduler.stop_in_vain(1)
        assert (refused.running, refused.retryable) == (True, True)
        assert "RAM disk" in refused.error
        scheduler.hear(Progress, lambda progress: progress.boundary > refused.boundary)


def test_a_tenant_s_limit_is_a_reason_to_refuse(workshop: Workshop, scheduler: ScriptedScheduler) -> None:
    workshop.environ |= {"GPUSLICE_TENANT": "vision", "GPUSLICE_TENANT_RAMDISK": "20k"}
    with job(workshop, scheduler, ENDLESS):
        scheduler.welcome()
        scheduler.grant(1)
        refused = scheduler.stop_in_vain(1)
        assert (refused.running, refused.retryable) == (True, True)
        assert refused.error.startswith("tenant vision has no room in the RAM disk")
        assert "--tenant-ramdisk vision=" in refused.remedy
        scheduler.hear(Progress, lambda progress: progress.boundary > refused.boundary)


def without_a_scheduler() -> Agent:
    runtime = Mock()
    runtime.settings.socket, runtime.settings.job, runtime.identity.rank = "ipc://nowhere", "job", 0
    runtime.identity.world_size, runtime.boundaries.count, runtime.boundaries.steps = 1, 9, 8
    agent = Agent(runtime)
    agent._link.close()
    agent._link = Mock(silent=False)
    assert [type(message) for message in agent._greeting()] == [Hello]
    return agent


def test_a_scheduler_that_comes_when_the_script_has_ended_hears_that_too() -> None:
    """The greeting replaces what was on its way to the last one, the Bye among it."""
    agent = without_a_scheduler()
    agent.finish()
    bye = Bye(epoch=0, boundary=9, step=8)
    assert [type(agent._greeting()[0]), *agent._greeting()[1:]] == [Hello, bye]
    agent._link.send.assert_called_once_with(bye)  # type: ignore[attr-defined]


def test_a_scheduler_that_comes_after_the_first_steps_hears_what_is_trained() -> None:
    agent = without_a_scheduler()
    agent._profiled(measure_skew([100, 300]))
    told = Profiled(epoch=0, tensors=2, nbytes=400, largest_bytes=300)
    agent._link.send.assert_called_once_with(told)  # type: ignore[attr-defined]
    agent._orders.epoch = 3
    assert agent._greeting()[1:] == [Profiled(epoch=3, tensors=2, nbytes=400, largest_bytes=300)]
