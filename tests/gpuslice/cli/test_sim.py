"""``gpuslice sim`` and ``gpuslice trace`` from outside."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuslice.cli import main

from ...patience import PATIENCE_S

DATA = Path(__file__).resolve().parents[2] / "data"
TRACE = DATA / "traces" / "60_job.csv"


def gpuslice(*words: object, path: Path | str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpuslice", *map(str, words)]
    environ = {**os.environ, "PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}"} if path else None
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PATIENCE_S, env=environ
    )


def test_one_policy_with_everything_written(tmp_path: Path) -> None:
    out, jobs = tmp_path / "out.json", tmp_path / "jobs.csv"
    done = gpuslice(
        *(
            "sim",
            TRACE,
            "--cluster",
            "2x4",
            "--policy",
            "2das",
            "--set",
            "thresholds=500,2000",
            "--set",
            "promote=4",
        ),
        *("--placement", "skew", "--set", "placement.threshold=0.5", "--cost", "fixed:5s"),
        *("--json", out, "--per-job", jobs, "--progress"),
    )
    assert (done.returncode, done.stdout.count("60/60")) == (0, 1), done.stderr
    summary = json.loads(out.read_text())["policies"][0]["summary"]
    assert summary["jobs_done"] == 60
    assert summary["preemptions"] > 0
    assert summary["lost_device_s"] > 0
    with jobs.open() as file:
        assert len(list(csv.DictReader(file))) == 60


def test_a_peer_to_the_second(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.csv"
    done = gpuslice("sim", TRACE, "--cluster", "2x4", "--peer", "tiresias:fjf/yarn", "--per-job", jobs)
    assert done.returncode == 0, done.stderr
    keys = ("job_id", "start_time", "end_time", "preempt", "promote")
    with jobs.open() as ours, (DATA / "oracles/tiresias/60_job.n2g4.fjf.yarn.csv").open() as theirs:
        mine = {row["job_id"]: [row[key] for key in keys] for row in csv.DictReader(ours)}
        assert mine == {row["job_id"]: [row[key] for key in keys] for row in csv.DictReader(theirs)}


def test_several_policies_in_processes(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    measured = tmp_path / "measured.csv"
    measured.write_text("job_id,jct\naverage,700\n")
    done = gpuslice(
        *(
            "sim",
            TRACE,
            "--cluster",
            "2x4",
            "--compare",
            "fifo,rr,2das",
            "--set",
            "quantum_s=30",
            "--jobs",
            "2",
            "--progress",
        ),
        *(
            "--set",
            "2das.promote=8",
            "--json",
            out,
            "--validate",
            measured,
            "--per-job",
            tmp_path / "jobs.csv",
            "--html",
            tmp_path / "page.html",
        ),
    )
    assert done.returncode == 0, done.stderr
    assert "fifo, rr, 2das on 60_job.csv" in (tmp_path / "page.html").read_text()
    names = [policy["summary"]["policy"] for policy in json.loads(out.read_text())["policies"]]
    assert names == ["fifo", "rr", "2das"]
    assert "fifo: average JCT simulated 1,556 s, measured 700 s, error +122.4%" in done.stdout
    assert (tmp_path / "jobs.rr.csv").exists()
    assert "policies: 3 of 3" in done.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--policy", "srft"], "did you mean 'srtf'?"),
        (["--placement", "spred"], "did you mean 'spread'?"),
        (["--set", "promot=2"], "did you mean 'promote'?"),
        (["--set", "promote"], "--set promote is not KEY=VALUE"),
        (["--set", "fifo.x=1"], "--set names 'fifo', which is not simulated"),
        (["--compare", "fifo,2das", "--set", "nothing=1"], "none of the policies has an option 'nothing'"),
        (["--cost", "dear"], "'dear' is not a cost"),
        (["--peer", "tiresias:fifo/count", "--cost", "fixed:1s"], "--peer sets"),
        (["--format", "gavle"], "did you mean 'gavel'?"),
        (["--cluster", "1x4"], "job 1 of 60_job.csv asks for 8 devices of 4"),
        (["--cluster", "four"], "'four' is not a cluster"),
        (["--json", "/nowhere/out.json"], "the directory of /nowhere/out.json does not exist"),
        (["--html", "/tmp"], "--html /tmp is a directory"),
        (["--per-job", "/proc/jobs.csv"], "--per-job /proc/jobs.csv cannot be written"),
        (["--per-job", str(TRACE)], "would overwrite what is read"),
        (["--throughputs", "table.json"], "60_job.csv is csv; only Gavel's traces count steps"),
        (["--policy", "themis", "--set", "tuner=frist"], "did you mean 'first'?"),
        (["--validate", "/nowhere/measured.csv"], "cannot read /nowhere/measured.csv"),
        (["--policy", "SRFT"], "did you mean 'srtf'?"),
        (["--policy", "tiresias"], "its policies are 2das and gittins"),
        (["--compare", "fifo,fifo"], "--compare names fifo twice"),
        (["--compare", "fifo,srtf", "--policy", "las"], "exclude each other"),
        (["--policy", "gandiva", "--placement", "spread"], "policy gandiva places jobs itself"),
        (["--set", "placement.seed=3"], "--set names 'placement', which is not simulated"),
        (["--set", "thresholds=nan"], "not a finite number"),
        (["--policy", "las", "--set", "quantum_s=inf"], "not a finite number"),
        (["--peer", "tiresias:fifo/count", "--policy", "srtf"], "--peer sets"),
        (["--peer", "tiresias:fifo/count", "--defragment"], "--peer sets"),
        (["--policy", "gandiva", "--defragment"], "places jobs itself"),
        (["--cluster", "99999999x8"], "more than 10,000,000 devices"),
    ],
)
def test_mistakes_exit_with_2_and_say_what(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = [] if "--cluster" in words else ["--cluster", "2x4"]
    with pytest.raises(SystemExit, match="2"):
        main(["sim", str(TRACE), *cluster, *words])
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "end_s", "moves"), [((), 2000, 0), (("--defragment", "--set", "apart_nodes=2"), 1090, 1)]
)
def test_gangs_move_together(tmp_path: Path, options: tuple[str, ...], end_s: int, moves: int) -> None:
    trace, speed, out = tmp_path / "jobs.csv", tmp_path / "speed.json", tmp_path / "out.json"
    trace.write_text("job_id,num_gpu,submit_time,duration\na,1,0,100\nb,1,0,900\ng,2,0,1000\n")
    speed.write_text('{"spread": 2.0}')
    words = ("--cluster", "2x3", "--policy", "srtf", "--speed", speed, "--cost", "fixed:40s", "--json", out)
    done = gpuslice("sim", trace, *words, *options)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(out.read_text())["policies"]
    assert (found["jobs"][2]["end_time"], found["summary"]["migrations"]) == (end_s, moves)


def test_large_jobs_are_clamped_on_request() -> None:
    assert gpuslice("sim", TRACE, "--cluster", "1x4", "--clamp", "--policy", "fifo").returncode == 0


def test_malformed_traces_exit_with_2_and_say_where(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("job_id,num_gpu,submit_time,duration\na,1,0,-3\n")
    done = gpuslice("sim", path, "--cluster", "1x1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "line 2, column 'duration': -3 is not a time" in done.stderr


def test_trace_commands(tmp_path: Path) -> None:
    made, converted = tmp_path / "made.csv", tmp_path / "converted.csv"
    assert gpuslice("trace", "synth", made, "--jobs", "30", "--cluster", "1x4", "--seed", "3").returncode == 0
    assert gpuslice("trace", "convert", made, converted).returncode == 0
    assert made.read_bytes() == converted.read_bytes()
    in_minutes = tmp_path / "in_minutes.csv"
    assert gpuslice("trace", "convert", made, in_minutes, "--unit", "1m").returncode == 0
    (seconds, minutes) = (_duration_s(path) for path in (converted, in_minutes))
    assert minutes == 60 * seconds
    assert gpuslice("trace", "convert", made, in_minutes, "--unit", "0s").returncode == 2
    done = gpuslice("trace", "stats", converted, "--json")
    assert json.loads(done.stdout)["jobs"] == 30
    assert "jobs_by_demand" in gpuslice("trace", "stats", TRACE).stdout
    assert gpuslice("trace", "synth", made, "--jobs", "0").returncode == 2
    done = gpuslice("trace", "synth", made, "--sigma", "nan")
    assert (done.returncode, "sigma of nan" in done.stderr) == (2, True)


def _duration_s(path: Path) -> float:
    with path.open() as file:
        return float(next(csv.DictReader(file))["duration"])


def test_the_simulator_needs_no_torch() -> None:
    code = (
        "import os, sys\nfrom gpuslice.cli import main\n"
        f"try: main(['sim', {str(TRACE)!r}, '--cluster', '2x4', '--html', os.devnull])\n"
        "except SystemExit: pass\nsys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0


def test_retries_by_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "failing.csv"
    path.write_text("job_id,num_gpu,submit_time,duration,attempts\na,2,0,30,10:user;10:user;10:user\n")
    with pytest.raises(SystemExit, match="0"):
        main(["sim", str(path), "--cluster", "1x2", "--retries", "user:0"])
    assert "1 jobs end earlier, 40 device-seconds spared" in capsys.readouterr().out


#: Runs the words after it, and says when the first job has ended.
TELLING = """
import sys
from gpuslice.cli import main
from gpuslice.sched_core.policies.las import LeastAttained

quiet = LeastAttained.plan

def plan(self, view):
    if view.changes.finished:
        print("a job ended", flush=True)
    return quiet(self, view)

LeastAttained.plan = plan
sys.exit(main(sys.argv[1:]))
"""


def told(running: subprocess.Popen[str]) -> tuple[str, str]:
    """What the process still says; it is killed if it does not end."""
    try:
        return running.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        running.kill()
        raise


def test_ctrl_c_leaves_what_is_known(tmp_path: Path) -> None:
    # Two jobs take turns every minute for thirty years; nobody waits for the end of that.
    trace, out, jobs = tmp_path / "trace.csv", tmp_path / "out.json", tmp_path / "jobs.csv"
    trace.write_text("job_id,num_gpu,submit_time,duration\na,1,0,10\nb,1,20,1e9\nc,1,20,1e9\n")
    words = ["sim", trace, "--cluster", "1x1", "--policy", "las", "--json", out, "--per-job", jobs]
    command = [sys.executable, "-c", TELLING, *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "a job ended\n"
        running.send_signal(signal.SIGINT)
        table, errors = told(running)
    assert running.returncode == 130, errors
    assert errors == "gpuslice: interrupted; these are the results so far\n"
    assert "las" in table
    (policy,) = json.loads(out.read_text())["policies"]
    assert (policy["summary"]["complete"], policy["summary"]["jobs_done"]) == (False, 1)
    with jobs.open() as file:
        ends = {row["job_id"]: row["end_time"] for row in csv.DictReader(file)}
    assert ends == {"a": "10", "b": "", "c": ""}


#: Runs policies on the trace that is its argument, and says how many are done.
COMPARING = """
import sys
from pathlib import Path
from gpuslice.sched_core.sim.run import Request, run_all
from gpuslice.sched_core.traces.formats import read_trace

trace = read_trace(Path(sys.argv[1]))
requests = [Request(trace, "1x1", policy) for policy in ("fifo", "las", "rr", "las")]
for outcome in run_all(requests, 2, lambda count: print(count, flush=True)):
    print(outcome.policy, outcome.complete)
"""


def test_ctrl_c_reaches_the_workers_of_a_comparison(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("job_id,num_gpu,submit_time,duration\na,1,0,10\nb,1,20,1e9\nc,1,20,1e9\n")
    command = [sys.executable, "-c", COMPARING, str(trace)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "1\n"
        running.send_signal(signal.SIGINT)  # to this process alone, not to its group
        out, errors = told(running)
    assert running.returncode == 0, errors
    assert "Traceback" not in errors
    first, *others = out.splitlines()
    assert first == "fifo True"
    assert all(line.endswith(" False") for line in others)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("jobs = list(view.waiting())", "policy forgetful returned None instead of a Plan"),
        ("return view.nonsense", "policy forgetful failed: AttributeError: 'View' object has no attribute"),
        ("return Plan([Start(next(view.waiting()).id, (7,))])", "device 7 does not exist"),
        ("return Plan((), -float('inf'))", "policy forgetful asks at 0 to be woken at -inf"),
    ],
)
def test_a_policy_that_makes_no_plan_is_named(tmp_path: Path, body: str, said: str) -> None:
    about = tmp_path / "forgetful-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: forgetful\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[gpuslice.policies]\nforgetful = forgetful:Forgetful\n")
    (tmp_path / "forgetful.py").write_text(
        "from gpuslice.sched_core.policy import Plan, Start\n"
        "class Forgetful:\n    name = 'forgetful'\n    needs_durations = False\n"
        f"    def plan(self, view):\n        {body}\n"
    )
    trace = tmp_path / "trace.csv"
    trace.write_text("job_id,num_gpu,submit_time,duration\na,1,0,60\nb,1,5,60\n")
    done = gpuslice("sim", trace, "--cluster", "1x1", "--policy", "forgetful", path=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("gpuslice: ")
    assert said in done.stderr
    assert "forgetful" in done.stderr
