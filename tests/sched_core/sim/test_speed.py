"""Speeds of spread and packed jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuslice.errors import UsageError
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.job import Job, JobSpec
from gpuslice.sched_core.sim.model import LinearSpeed
from gpuslice.sched_core.sim.speed import parse_speed

CLUSTER = Cluster.parse("2x4")


def job(model: str, placement: tuple[int, ...], demand: int) -> Job:
    made = Job(JobSpec(id=model, submit_s=0.0, devices=demand, model=model), 0)
    made.placement = placement
    return made


def written(tmp_path: Path, content: object) -> str:
    path = tmp_path / "speed.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_spread_and_packed_jobs_are_slower_as_measured(tmp_path: Path) -> None:
    measured = {"spread": 1.25, "models": {"vgg": 2.0}, "packed": 0.6, "pairs": {"vgg": {"lstm": 0.9}}}
    speed = parse_speed(written(tmp_path, measured))
    lstm = job("lstm", (0,), 1)
    assert speed.rate(lstm, [], CLUSTER) == 1.0
    assert speed.rate(job("vgg", (0, 4), 2), [], CLUSTER) == 0.5
    assert speed.rate(job("other", (0, 4), 2), [], CLUSTER) == 0.8
    assert speed.rate(job("vgg", (0,), 1), [lstm], CLUSTER) == 0.9
    assert speed.rate(lstm, [job("vgg", (0,), 1)], CLUSTER) == 0.6


def test_racks_and_sockets_have_slowdowns_of_their_own(tmp_path: Path) -> None:
    speed = parse_speed(written(tmp_path, {"spread": 2.0, "racks": 1.5, "sockets": 1.25}))
    cluster = Cluster.parse("2x2x4/2")
    rates = {}
    for devices in ((0, 1), (1, 2), (0, 4), (0, 8)):
        job = Job(JobSpec(id="j", submit_s=0.0, devices=2), 0)
        job.placement = devices
        rates[devices] = speed.rate(job, (), cluster)
    assert rates == {(0, 1): 1.0, (1, 2): 1 / 1.25, (0, 4): 1 / 2.0, (0, 8): 1 / 3.0}


def test_more_devices_than_a_node_has_must_be_spread(tmp_path: Path) -> None:
    speed = parse_speed(written(tmp_path, {"spread": 2.0}))
    assert speed.rate(job("big", tuple(range(6)), 6), [], CLUSTER) == 1.0


def test_linear_is_built_in() -> None:
    assert isinstance(parse_speed("linear"), LinearSpeed)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"spred": 2}, "unknown field"),
        ({"spread": "x"}, "float"),
        ({"packed": 0}, "at 0.0 times"),
        ({"pairs": {"a": {"b": 1.5}}}, "1.5 times"),
        ({"models": {"a": 0.5}}, "speed-up"),
    ],
)
def test_impossible_files_are_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_speed(written(tmp_path, content))


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a speed"):
        parse_speed("fast")
    with pytest.raises(UsageError, match="cannot read"):
        parse_speed(str(tmp_path / "missing.json"))
