"""The drill: where it suspends, and how it ends a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpuslice.agent.drill import Drill, from_settings
from gpuslice.config import Settings
from gpuslice.errors import ConfigError, EnvironmentUnusableError
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.runtime import trainings
from gpuslice.runtime.boundaries import NEVER, BoundaryCounter
from gpuslice.runtime.runtime import Runtime


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Runtime]:
    settings = Settings(ramdisk_dir=str(tmp_path / "ramdisk"))
    runtime = Runtime(settings, RankIdentity(), BoundaryCounter())
    yield runtime
    trainings.close(runtime)


@pytest.fixture(autouse=True)
def no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A drill's thread lives as long as its job; this process has further tests."""
    started, start = [], Drill.start

    def note(drill: Drill) -> None:
        started.append(drill)
        start(drill)

    monkeypatch.setattr(Drill, "start", note)
    yield
    for drill in started:
        drill.end_threads()


def stops(drill: Drill, job: Runtime, count: int) -> list[int]:
    """The boundaries of ``count`` that the drill is called at, without suspending there."""
    drill.start()
    found = []
    for boundary in range(1, count + 1):
        if boundary >= job.boundaries.stop_at:
            found.append(boundary)
            drill._ask(boundary)
    return found


@pytest.mark.parametrize(
    ("every", "at", "found"),
    [
        (1, (), [1, 2, 3, 4, 5, 6, 7]),
        (3, (), [3, 6]),
        (8, (), []),
        (0, (3, 4, 7), [3, 4, 7]),
        (0, (7, 1), [1, 7]),
        (0, (100,), []),
    ],
)
def test_it_asks_for_the_boundaries_of_its_list(
    job: Runtime, every: int, at: tuple[int, ...], found: list[int]
) -> None:
    assert stops(Drill(job, every=every, at=frozenset(at)), job, 7) == found


def test_a_job_that_continues_is_suspended_at_the_boundaries_that_are_left(job: Runtime) -> None:
    job.boundaries.count = 10
    Drill(job, every=4).start()
    assert job.boundaries.stop_at == 12
    Drill(job, at=frozenset({3, 10, 40})).start()
    assert job.boundaries.stop_at == 40
    Drill(job, at=frozenset({3, 10})).start()
    assert job.boundaries.stop_at == NEVER


def test_it_suspends_and_resumes_on_the_spot(job: Runtime) -> None:
    tensor = torch.arange(50_000.0)
    before = tensor.clone()
    drill = Drill(job, at=frozenset({2, 5}))
    job.boundaries.controller = drill
    drill.start()
    for _ in range(6):
        job.boundaries.fetching()
    assert torch.equal(tensor, before)
    totals = job.report.totals(boundaries=6, steps=0)
    assert totals["switches"] == 2
    assert not job.suspension.away


def test_it_leaves_a_boundary_inside_backward_to_the_next_one(job: Runtime) -> None:
    drill = Drill(job, every=1)
    job.boundaries.controller = drill
    drill.start()
    switches = []

    def inside(gradient: torch.Tensor) -> None:
        job.boundaries.fetching()
        switches.append(job.report.totals(boundaries=0, steps=0)["switches"])

    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(inside)
    weight.sum().backward()
    assert switches == [0]
    job.boundaries.fetching()
    assert job.report.totals(boundaries=0, steps=0)["switches"] == 1


def test_a_suspend_that_is_impossible_ends_the_job_with_its_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensor = torch.arange(50_000.0)
    settings = Settings(ramdisk_dir=str(tmp_path / "small"), ramdisk_limit="1k")
    job = Runtime(settings, RankIdentity(), BoundaryCounter())
    with pytest.raises(SystemExit) as ended:
        Drill(job, every=1).at_boundary(1)
    trainings.close(job)
    assert ended.value.code == 5
    assert tensor[-1] == 49_999
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_the_ram_disk_is_looked_at_before_the_training_begins(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    settings = Settings(ramdisk_dir=str(tmp_path / "link"), suspend_every=1)
    drill = from_settings(Runtime(settings, RankIdentity(), BoundaryCounter()))
    assert drill is not None
    with pytest.raises(EnvironmentUnusableError, match="link"):
        drill.start()


def test_every_and_at_exclude_each_other(job: Runtime) -> None:
    with pytest.raises(ConfigError, match="both"):
        Drill(job, every=1, at=frozenset({3}))


def test_without_a_setting_there_is_no_drill(job: Runtime) -> None:
    assert from_settings(job) is None
