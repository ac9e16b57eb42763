"""What switching costs, from text and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuslice import wire
from gpuslice.checkpoint.switch.record import SwitchRecord
from gpuslice.errors import UsageError
from gpuslice.sched_core.job import Job, JobSpec
from gpuslice.sched_core.journal.journal import FILE, Journal
from gpuslice.sched_core.lifecycle.events import Reported, Submitted
from gpuslice.sched_core.sim.cost import parse_cost, parse_time
from gpuslice.sched_core.switch_cost_model import CostModel, Estimate, State

from ..driver import PROGRAM

SWITCH = {
    "quiesce_s": 0.1,
    "find_s": 1.0,
    "admit_s": 2.0,
    "copy_out_s": 0.2,
    "publish_s": 0.0,
    "free_s": 0.1,
    "parked_s": 50.0,
    "reserve_s": 0.1,
    "copy_in_s": 4.5,
}


def seconds(text: str, model: str = "") -> float:
    return parse_cost(text).resume_s(Job(JobSpec(id="j", submit_s=0.0, model=model), 0))


def test_words() -> None:
    assert seconds("none") == 0
    assert seconds("fixed:62s") == 62
    assert seconds("fixed:1.5m") == 90


def test_measured(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"switches": [SWITCH, {**SWITCH, "copy_in_s": 5.5}]}))
    assert seconds(str(path)) == pytest.approx(8.5)
    medians = {"test_suspend": 0.25, "test_resume": 0.5, "test_limit[out]": 9.0}
    rows = [{"name": name, "stats": {"median": median}} for name, median in medians.items()]
    path.write_text(json.dumps({"machine_info": {}, "benchmarks": rows}))
    assert seconds(str(path)) == 0.75
    vgg = {"suspend_s": 3, "resume_s": 4}
    path.write_text(json.dumps({"suspend_s": 1, "resume_s": 1.5, "models": {"vgg16": vgg}}))
    assert (seconds(str(path)), seconds(str(path), "vgg16")) == (2.5, 7)


def test_a_report_counts_as_its_own_record_does(tmp_path: Path) -> None:
    record = SwitchRecord(
        boundary=3, find_s=0.5, admit_s=0.25, copy_out_s=2.0, parked_s=9.0, reserve_s=0.125, copy_in_s=1.0
    )
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"switches": [record.as_dict()]}))
    assert seconds(str(path)) == record.suspend_s + record.resume_s == 3.875


def journal(directory: Path, *switches: tuple[str, int, float]) -> Path:
    """A scheduler's directory: jobs by model, the bytes that each moved, seconds out; in takes half of it."""
    with Journal(directory / FILE) as written:
        for number, (model, nbytes, out_s) in enumerate(switches):
            job = f"j{number}"
            submitted = Submitted(JobSpec(id=job, submit_s=0.0, model=model), PROGRAM)
            suspended = wire.Suspended(
                epoch=1, boundary=1, step=1, nbytes=nbytes, tensors=10, stages_s={"copy_out_s": out_s}
            )
            stages_s = {"copy_in_s": out_s / 2, "parked_s": 50.0}
            resumed = wire.Resumed(epoch=2, boundary=1, stages_s=stages_s)
            for event in (submitted, Reported(job, 0, suspended), Reported(job, 0, resumed)):
                written.append(event, float(number), quiet=False)
    return directory


def test_by_the_journal_of_a_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    switches = [("small", 10**8, 0.1), ("large", 10**9, 1.0)] * 5
    text = f"measured:{journal(tmp_path, *switches)}"
    assert seconds(text, "small") == pytest.approx(0.15)
    assert seconds(text, "large") == pytest.approx(1.5)
    assert seconds(text, "unheard-of") == pytest.approx(0.825)
    monkeypatch.setenv("GPUSLICE_STATE_DIR", str(tmp_path))
    assert seconds("measured", "small") == pytest.approx(0.15)
    sized = Job(JobSpec(id="j", submit_s=0.0, model="small", device_memory_bytes=4 * 10**9), 0)
    assert parse_cost("measured").resume_s(sized) == pytest.approx(6.0, rel=0.01)


def test_the_journal_is_summed_up_once_for_each_kind_of_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = parse_cost(f"measured:{journal(tmp_path, *[('small', 10**8, 0.1)] * 5)}")
    asked: list[State] = []
    switch = CostModel.switch

    def counted(model: CostModel, state: State) -> Estimate | None:
        asked.append(state)
        return switch(model, state)

    monkeypatch.setattr(CostModel, "switch", counted)
    for nbytes, questions in ((0, 5), (10**9, 1)):
        asked.clear()
        for number in range(3):
            spec = JobSpec(id=str(number), submit_s=0.0, model="small", device_memory_bytes=nbytes)
            assert cost.resume_s(Job(spec, number)) > 0
        assert len(asked) == questions


def test_without_measurements(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no journal"):
        parse_cost(f"measured:{tmp_path}")
    with pytest.raises(UsageError, match="has no switches"):
        parse_cost(f"measured:{journal(tmp_path)}")


@pytest.mark.parametrize("text", ["free", "fixed:", "fixed:-1s", "fixed:1y", "absent.json"])
def test_what_is_no_cost(text: str) -> None:
    with pytest.raises(UsageError):
        parse_cost(text)


@pytest.mark.parametrize(
    "content",
    [
        *('{"benchmarks": []}', "[]", "{", "{}", '{"switches": []}', '{"suspend_s": "x", "resume_s": 1}'),
        *(json.dumps({"switches": [{**SWITCH, "find_s": wrong_s}]}) for wrong_s in (-9.0, float("nan"))),
    ],
)
def test_files_that_hold_no_cost(tmp_path: Path, content: str) -> None:
    path = tmp_path / "measured.json"
    path.write_text(content)
    with pytest.raises(UsageError, match="holds no switching costs"):
        parse_cost(str(path))


def test_times() -> None:
    assert [parse_time(text) for text in ("500ms", "2h", "7")] == [0.5, 7200, 7]
