"""Reading traces, and refusing malformed ones with line and column."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuslice.errors import UsageError
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.traces.cells import TraceError
from gpuslice.sched_core.traces.describe import stats, write_csv
from gpuslice.sched_core.traces.formats import read_trace
from gpuslice.sched_core.traces.gavel import read_gavel

HEADER = "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n"
CHRONUS = (
    "job_id,user,num_gpu,submit_time,iterations,model_name,duration,interval,expect_time_list,expect_value_list,"
    "best_effort,job_type\n"
    "7,vc,1,10,97,resnet101,223,10,470-490,10-8,0,soft\n"
    "8,vc,8,20,78,vgg16,489,14,20,10,1,best\n"
)
GAVEL = "ResNet-18 (batch size 32)\tpython main.py\tcifar\t--steps\t1\t1200\t2\t1\t-1.000000\t55\n"
ALIBABA = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
    "a,1,1,1,500,,LS,Running,10,110,20\n"
    "b,1,1,0,0,,LS,Running,10,110,20\n"
)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_csv_is_sorted_by_submission_and_ties_keep_their_order(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, HEADER + "b,1,5,1,m,9,0\na,2,0,1,m,8.5,0\nc,4,5,1,m,7,0\n"))
    assert (trace.ids, trace.demand, trace.duration_s) == (["a", "b", "c"], [2, 1, 4], [8.5, 9, 7])
    assert trace.spec(0).model == "m"


def test_chronus_columns(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, CHRONUS))
    assert trace.spec(0).deadlines == ((470, 10), (490, 8))
    assert trace.spec(1).deadlines == ()
    assert trace.spec(0).tenant == "vc"


def test_two_columns_that_say_the_same_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "job_id,num_gpu,submit_time,duration,user,tenant\na,1,0,9,u,t\n")
    with pytest.raises(TraceError, match="line 1: columns 'user' and 'tenant' both give the tenant"):
        read_trace(path)


def test_gavel(tmp_path: Path) -> None:
    path = write(tmp_path, GAVEL)
    trace = read_trace(path)
    assert (trace.demand, trace.submit_s, trace.duration_s) == ([2], [55], [1200])
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"v100": {"('ResNet-18 (batch size 32)', 2)": {"null": 4.0}}}))
    assert read_gavel(path, table).duration_s == [300]
    table.write_text(json.dumps({"v100": {}}))
    with pytest.raises(TraceError, match="line 1, column 'job_type': no throughput"):
        read_gavel(path, table)


def test_alibaba_leaves_out_pods_without_gpus(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, ALIBABA))
    assert (trace.ids, trace.submit_s, trace.duration_s) == (["a"], [10], [90])


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("0,1,0,1,m,-5,0", "line 3, column 'duration': -5 is not a time"),
        ("0,1,0,1,m,nan,0", "line 3, column 'duration': nan is not a time"),
        ("0,1,0,1,m,inf,0", "line 3, column 'duration'"),
        ("0,1,zero,1,m,5,0", "line 3, column 'submit_time': 'zero' is not a number"),
        ("0,0,0,1,m,5,0", "line 3, column 'num_gpu': 0 is less than 1"),
        ("0,1.5,0,1,m,5,0", "line 3, column 'num_gpu': 1.5 is not a whole number"),
        ("0,nan,0,1,m,5,0", "line 3, column 'num_gpu'"),
        ("0,1,0,1,m,,0", "line 3, column 'duration': nothing there"),
        ("0,1,0", "line 3, column 'duration': nothing there"),
        ("0,1,0,1,m,5,0,9,9", "line 3, column 'interval': there are more cells"),
        (",1,0,1,m,5,0", "line 3, column 'job_id': nothing there"),
    ],
)
def test_malformed_rows_are_named(tmp_path: Path, row: str, named: str) -> None:
    with pytest.raises(TraceError, match=named):
        read_trace(write(tmp_path, HEADER + "ok,1,0,1,m,5,0\n" + row + "\n"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (HEADER, "trace.csv has no jobs"),
        ("", "is empty"),
        ("x,y\n1,2\n", "known trace format"),
        ("job_id,num_gpu,submit_time\n1,1,1\n", "no column 'duration'"),
        ("job_id,gpus,submit_time,duration\n1,1,1,1\n", "no column 'num_gpu'"),
        (HEADER + "a,1,0,1,m,5,0\na,1,0,1,m,5,0\n", "line 3, column 'job_id': line 2 has a job 'a' already"),
        ('[{"jobid": 1}]', "job 0 has no 'attempts'"),
        ("[{", "line 1, column"),
        ("{}", "holds no list of jobs"),
        ("[5]", "job 0: "),
        ("job_id,num_gpu,num_gpu,submit_time,duration\na,1,2,0,5\n", "2 columns 'num_gpu'"),
        (CHRONUS.replace("470-490", "490-470"), "column 'expect_time_list': 490-470 does not ascend"),
        (CHRONUS.replace("470-490", "470-nan"), "column 'expect_time_list': .* finite"),
        (GAVEL.replace("1200", "many"), "line 1, column 'total_steps': 'many' is not a number"),
        (CHRONUS.replace("10-8", "10"), "column 'expect_time_list': 2 times but 1 values"),
        (ALIBABA.replace("110,20", "15,20"), "column 'deletion_time'"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        read_trace(write(tmp_path, text))


@pytest.mark.parametrize(
    ("column", "cell", "named"),
    [
        ("weight", "0", "'weight': 0 is not above 0"),
        ("skew", "7", "'skew': 7 is not a share"),
        ("min_gpu", "3", "'min_gpu': 3 is more than the num_gpu of 2"),
        ("max_gpu", "1", "'max_gpu': 1 is less than the num_gpu of 2"),
        ("cpus", "-1", "'cpus': -1 is less than 0"),
    ],
)
def test_optional_cells_are_checked_and_may_be_empty(
    tmp_path: Path, column: str, cell: str, named: str
) -> None:
    head = f"job_id,num_gpu,submit_time,duration,{column}\n"
    with pytest.raises(TraceError, match=named):
        read_trace(write(tmp_path, head + f"a,2,0,5,{cell}\n"))
    empty = read_trace(write(tmp_path, head + "a,2,0,5,\n")).spec(0)
    assert empty == JobSpec(id="a", submit_s=0, devices=2)


def test_what_spreadsheets_write_is_read(tmp_path: Path) -> None:
    """A byte order mark, spaces after commas, empty lines, carriage returns."""
    path = tmp_path / "trace.csv"
    path.write_bytes(
        b"\xef\xbb\xbfjob_id, num_gpu, submit_time, duration\r\na, 1, 0, 5\r\n\r\nb, 2, 3, 4\r\n"
    )
    assert read_trace(path).demand == [1, 2]


def test_older_gavel_lines_lack_priority_and_slo(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, GAVEL.replace("1\t-1.000000\t", "")))
    assert (trace.submit_s, trace.spec(0).weight) == ([55], 1)


def test_clamped_jobs_keep_bounds_that_fit(tmp_path: Path) -> None:
    head = "job_id,num_gpu,submit_time,duration,min_gpu,max_gpu\n"
    clamped = read_trace(write(tmp_path, head + "a,8,0,5,6,16\n")).clamped(4).spec(0)
    assert (clamped.devices, clamped.least_devices, clamped.most_devices) == (4, 4, 4)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="not text"):
        read_trace(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_trace(tmp_path / "absent.csv")
    with pytest.raises(UsageError, match="did you mean 'philly'"):
        read_trace(path, "phily")


def test_written_traces_are_read_back(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, CHRONUS))
    write_csv(trace, tmp_path / "again.csv")
    again = read_trace(tmp_path / "again.csv")
    assert [again.spec(i) for i in range(2)] == [trace.spec(i) for i in range(2)]
    assert again.duration_s == trace.duration_s


def test_stats(data: Path) -> None:
    found = stats(read_trace(data / "traces" / "60_job.csv"))
    assert found["jobs"] == 60
    assert found["jobs_by_demand"] == {"1": 30, "2": 10, "4": 10, "8": 10}
