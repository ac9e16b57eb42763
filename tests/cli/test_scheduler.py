"""The scheduler's commands, as processes, with jobs that train nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from gpuslice import verbs
from gpuslice.cli import client_commands, main
from gpuslice.cli.job_choice import Choice
from gpuslice.client.client import Client
from gpuslice.daemon import event_log
from gpuslice.errors import EnvironmentUnusableError, UsageError
from gpuslice.sched_core.live.scheduler import Scheduler

from ..gpuslice.warm.process import Servers
from ..patience import PATIENCE_MS, PATIENCE_S
from .conftest import RANK, Shell, shell_in
from .waiting import until


def test_a_job_from_submit_to_down(shell: Shell) -> None:
    shell.up()
    script = shell.directory / "hello.py"
    seen = "os.environ['WHO'], os.getcwd(), os.environ['GPUSLICE_CHECKPOINT_EVERY']"
    script.write_text(f"import os; print('hello', {seen})\nraise SystemExit(7)\n")
    job = shell("submit", "--env", "WHO=world", "--checkpoint-every", "5", str(script)).strip()
    assert job == "hello-1"
    assert "failed: it ended with exit code 7" in shell("wait", job, "--timeout", "60s", code=7)
    assert shell("logs", job, "-f") == f"hello world {os.getcwd()} 5\n"
    header, row = (line.split("\t") for line in shell("ps", "--wide").splitlines())
    why = "it ended with exit code 7"
    assert (header[0], row[0], row[2], *row[-2:]) == ("JOB", job, "failed", "7 user", why)
    shell("down")
    assert shell("ps").splitlines()[1].split() == [
        *(job, "-", "failed", "-", "-", "0.0", "s"),
        *f"exit 7, user: {why}".split(),
    ]


def test_programs_are_told_in_json(shell: Shell) -> None:
    told = json.loads(shell("up", "--devices", "null:1", "--json"))
    assert told == {"pid": shell.pid, "directory": str(shell.directory)}
    job = json.loads(shell("submit", "--json", "--", sys.executable, "-c", "pass"))["id"]
    ended = json.loads(shell("wait", job, "--json"))
    assert (ended["id"], ended["state"], ended["exit_code"]) == (job, "succeeded", 0)
    assert ended == json.loads(shell("ps", "--json"))["jobs"][0] == json.loads(shell("show", job, "--json"))
    assert "there is no job 'other'" in shell("show", "other", code=2)
    said = shell("suspend", job, code=2)
    assert said.splitlines()[1] == "gpuslice: `gpuslice ps` shows how it stands"
    shell("down")


def test_several_jobs_are_waited_for_and_told_what_to_do(
    shell: Shell, capfd: pytest.CaptureFixture[str]
) -> None:
    shell.up()
    seven, three, good = (
        shell("submit", "--name", f"exits-{code}", "--", "sh", "-c", f"exit {code}").strip()
        for code in (7, 3, 0)
    )
    said = shell("wait", good, three, seven, code=3)
    assert "exit code 3" in said
    assert "exit code 7" in said
    assert shell("wait", good, good) == ""
    assert client_commands.wait([good, seven], as_json=True, state_dir=shell.directory) == 7
    ended = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [(one["id"], one["exit_code"]) for one in ended] == [(good, 0), (seven, 7)]
    jobs = [shell.submit(10**6) for _ in range(2)]
    assert shell("wait", good, *jobs, "--timeout", "10ms", code=124) == ""
    for job in jobs:  # one that has not begun would be held, not suspended
        until(shell.client(), job, lambda info: info.state != "queued")
    assert "there is no job 'c'" in shell("cancel", jobs[0], "c", jobs[1], code=2)
    assert not any(info.ended for info in shell.client().jobs() if info.id in jobs), "c was to stop all"
    assert "impossible" in shell("suspend", jobs[0], good, jobs[1], code=2)
    assert all(until(shell.client(), job, lambda info: info.state == "suspended") for job in jobs)
    assert shell("resume", *jobs) == ""
    assert (
        client_commands.cancel(Choice([jobs[0], good, jobs[1]]), as_json=True, state_dir=shell.directory) == 2
    )
    told = capfd.readouterr()
    assert [json.loads(line)["id"] for line in told.out.splitlines()] == jobs
    assert "impossible" in told.err
    assert client_commands.wait(jobs, state_dir=shell.directory) in (143, 137)
    assert [line.split()[2] for line in capfd.readouterr().err.splitlines()] == ["cancelled:"] * 2
    shell("down")


def test_every_order_is_answered_in_json_if_that_is_wanted(shell: Shell) -> None:
    shell("up", "--devices", "null:1")
    job = shell.submit(10**6)
    until(shell.client(), job, lambda info: info.state == "running")  # else it is held, and has no size yet
    told = {"id": job}
    moving = {**told, "from": ["null:0"], "to": ["null:0"], "bytes": 1, "expected_s": 0.0}
    orders = [
        (("suspend",), told),
        (("resume",), told),
        (("migrate", "--to", "null:0"), moving),
        (("weight", "2"), told),
        (("cancel",), told),
    ]
    for (verb, *words), answer in orders:
        assert json.loads(shell(verb, job, *words, "--json")) == answer
        if verb in ("suspend", "resume"):  # the next order is about a job that has done this
            state = {"suspend": "suspended", "resume": "running"}[verb]
            until(shell.client(), job, lambda info, state=state: info.state == state)
    found = json.loads(shell("logs", job, "--json"))
    assert {name: Path(found[name]).name for name in ("out", "err")} == {
        "out": f"{job}.out",
        "err": f"{job}.err",
    }
    assert found["out_bytes"] == Path(found["out"]).stat().st_size > 0
    pid = shell.status().pid
    assert json.loads(shell("down", "--json")) == {"pid": pid}


def test_the_keys_of_ps_are_the_documented_ones(shell: Shell) -> None:
    shell.up()
    job = shell.submit(10)
    shell("wait", job)
    found = json.loads(shell("ps", "--json"))
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    for key in (*found, *found["jobs"][0], *found["devices"][0]):
        assert f"`{key}`" in page, key
    shell("down")


def test_events_tell_the_story_of_a_job(shell: Shell) -> None:
    shell.up()
    job = shell.submit(20, 3)
    shell("wait", job, code=3)
    events = [json.loads(line) for line in shell("events", "--json").splitlines()]
    assert [event["what"] for event in events if event["what"] != "rank_gone"] == [
        "submitted",
        "hello",
        "resumed",
        "began",
        "bye",
        "exited",
        "failed",
    ]
    assert {event["job"] for event in events} == {job}
    exited = next(event for event in events if event["what"] == "exited")
    assert exited["details"] == {"attempt": 1, "code": 3, "said": "", "node": None}
    assert "PATH" not in shell("events", "--json"), "environments are nobody's business"
    assert len(shell("events").splitlines()) == len(events)
    shell("down")


def test_a_second_scheduler_is_refused_and_disturbs_nothing(shell: Shell) -> None:
    shell.up()
    pid = shell.pid
    assert f"a scheduler (pid {pid}) runs in" in shell("up", code=3)
    assert shell.status().pid == pid
    shell("down")


def test_a_scheduler_of_the_same_devices_elsewhere_is_refused_as_long_as_the_first_lives(
    shell: Shell, tmp_path: Path, commands: Servers
) -> None:
    shell("up", "--devices", "cpu:2")
    with shell_in(tmp_path / "second", commands) as second:
        refused = second("up", "--devices", "cpu:1", code=3)
        assert refused.startswith(f"gpuslice: cpu:0 has a scheduler already: process {shell.pid} of user ")
        assert f" in {shell.directory}" in refused
        shell.kill()
        shell("up", "--devices", "cpu:2")
        shell("down")
        shell("up", "--devices", "cpu:2")
        shell.kill()
        second("up", "--devices", "cpu:1")
        assert f"process {second.pid} of user" in shell("up", "--devices", "cpu:2", code=3)
        second("down")


def test_the_directory_may_be_a_link_to_ones_own(shell: Shell, tmp_path: Path, commands: Servers) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    shell.directory.symlink_to("disk")
    shell.up()
    job = shell.submit(boundaries=3)
    shell("wait", job)
    shell.kill()
    with shell_in(tmp_path / "disk", commands) as real:
        real.up()
        assert [one.id for one in real.status().jobs] == [job]
        shell("down")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--devices", "gpu"], "'gpu' is not a device"),
        (["--devices", "cpu:0,cpu:0"], "twice"),
        (["--devices", "cpu:0"], "write cpu:1"),
        (["--policy", "best"], "no policy 'best'"),
        (["--policy", "tetris"], "needs to know how long"),
        (["--policy", "chronus", "--set", "lease_s=5", "--quantum", "2s"], "are no multiple"),
        (["--switch-share", "1.5"], "not a share of the time"),
        (["--policy", "fifo", "--quantum", "1s"], "no quantum"),
        (["--set", "speed=9"], "no option 'speed'"),
        (["--quota", "t"], "not TENANT=DEVICES"),
        (["--tenant-ramdisk", "t"], "not TENANT=SIZE"),
        (["--tenant-ramdisk", "t=much"], "'much' is not a size"),
        (["--quantum", "soon"], "'soon' is not a time"),
    ],
)
def test_a_scheduler_that_cannot_be_is_refused_before_it_is_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    why: str,
) -> None:
    def run(*_: object) -> None:
        raise AssertionError("it is there")

    monkeypatch.setattr(Scheduler, "run", run)
    with pytest.raises(SystemExit, match="2"):
        main(["up", "--foreground", "--state-dir", str(tmp_path / "s"), *words])
    assert why in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_what_is_wrong_with_it_is_told_to_who_starts_it_in_the_background(shell: Shell) -> None:
    assert "'gpu' is not a device" in shell("up", "--devices", "gpu", code=2)


def test_one_whose_jobs_could_have_no_ram_disk_is_refused(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSLICE_RAMDISK_DIR", "/proc/nothing")
    assert "cannot make /proc/nothing" in shell("up", "--devices", "cpu:1", code=3)
    assert "runs in" in shell("up", "--devices", "null:1"), "without memory there are no snapshots"
    shell("down")


def test_wait_gives_up_with_124_and_cancel_ends_the_job(shell: Shell) -> None:
    shell.up()
    job = shell.submit(10**6, name="endless")
    assert job == "endless"
    shell("wait", job, "--timeout", "50ms", code=124)
    shell("cancel", job)
    assert "cancelled by its owner" in shell("wait", job, code=143)
    assert "impossible" in shell("cancel", job, code=2)
    assert "no job 'nobody'" in shell("wait", "nobody", code=2)
    shell("down")


def test_suspend_keeps_a_job_away_until_resume(shell: Shell) -> None:
    shell.up()
    client = shell.client()
    enough = shell.directory / "enough"
    job = shell.submit(enough)
    until(client, job, lambda info: info.state == "running")
    shell("suspend", job)
    found = until(client, job, lambda info: info.state == "suspended")
    assert (found.held, found.devices) == (True, ())
    assert client.wait(shell.submit(20)) is not None, "another job runs meanwhile"
    assert next(one for one in client.jobs() if one.id == job).state == "suspended"
    shell("resume", job)
    until(client, job, lambda info: info.steps > found.steps)
    enough.touch()
    ended = client.wait(job, PATIENCE_S)
    assert ended is not None
    assert (ended.state, ended.exit_code) == ("succeeded", 0)
    shell("down")


def test_down_with_drain_lets_jobs_finish_and_takes_no_more(shell: Shell) -> None:
    shell.up()
    client = shell.client()
    enough = shell.directory / "enough"
    job = shell.submit(enough)
    until(client, job, lambda info: info.state == "running")
    down = subprocess.Popen(
        [sys.executable, "-m", "gpuslice", "down", "--drain", "--state-dir", str(shell.directory)]
    )
    with down:
        until_it_leaves = iter(lambda: client.submit(["--", "true"]), None)
        with pytest.raises(EnvironmentUnusableError, match="about to leave"):
            any(client.wait(other, PATIENCE_S) is None for other in until_it_leaves)
        assert not next(one for one in client.jobs() if one.id == job).ended
        enough.touch()
        assert down.wait(PATIENCE_S) == 0
    with pytest.raises(EnvironmentUnusableError, match="no scheduler runs"):
        client.jobs()
    log = (shell.directory / event_log.FILE).read_text(encoding="utf-8").splitlines()
    ends = [line["job"] for line in map(json.loads, log) if line["details"].get("to") == "succeeded"]
    assert job in ends


@pytest.mark.parametrize(("printed", "hint"), [("", True), ("something", False)])
def test_who_reads_the_empty_log_of_a_job_is_told_that_it_wrote_to_stderr(
    shell: Shell, capfd: pytest.CaptureFixture[str], printed: str, hint: bool
) -> None:
    shell.up()
    script = f"import sys; print({printed!r}, end=''); sys.exit('no data')"
    shell("submit", "--name", "a", "--", sys.executable, "-c", script)
    assert client_commands.logs("a", follow=True, state_dir=shell.directory) == 0
    captured = capfd.readouterr()
    assert captured.out == printed
    assert ("gpuslice logs --err a" in captured.err) == hint
    assert client_commands.logs("a", stderr=True, state_dir=shell.directory) == 0
    assert capfd.readouterr() == ("no data\n", "")


@pytest.mark.parametrize("ends", [True, False], ids=["drained", "killed"])
def test_whoever_follows_a_log_sees_its_end_when_the_scheduler_leaves_with_the_job(
    shell: Shell, ends: bool, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    shell.up()
    go_on = shell.directory / "go-on"
    wait_for_it = f"while not os.path.exists({str(go_on)!r}): time.sleep(0.05)"
    script = f"import os, time\nprint('begun', flush=True)\n{wait_for_it}\nprint('ended')"
    shell("submit", "--name", "told", "--", sys.executable, "-c", script)
    client = shell.client()
    until(client, "told", lambda info: bool(client.read_log("told")))
    wait, turns = Client.wait, list[float | None]()

    def wait_too_long(client: Client, job: str, timeout_s: float | None = None) -> object:
        """Between two looks the job ends, and the scheduler goes with it; or is killed before."""
        turns.append(timeout_s)
        if len(turns) == 2 and ends:
            go_on.touch()
            shell("down", "--drain")
        elif len(turns) == 2:
            shell.kill()
        return wait(client, job, timeout_s)

    monkeypatch.setattr(Client, "wait", wait_too_long)
    if ends:
        assert client_commands.logs("told", follow=True, state_dir=shell.directory) == 0
        assert capfdbinary.readouterr().out == b"begun\nended\n"
    else:
        with pytest.raises(EnvironmentUnusableError, match="no scheduler runs"):
            client_commands.logs("told", follow=True, state_dir=shell.directory)


@pytest.mark.parametrize("how", [[], ["--drain"]])
def test_down_returns_when_the_scheduler_itself_is_gone(shell: Shell, how: list[str]) -> None:
    words = ["up", "--foreground", "--devices", "null:1", "--state-dir", str(shell.directory)]
    slow = "import atexit, sys, time; from gpuslice.cli import main; atexit.register(time.sleep, 1.0)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{slow}; main({words})"], stdout=subprocess.PIPE, text=True
    ) as scheduler:
        assert scheduler.stdout is not None
        assert "scheduling null:0" in scheduler.stdout.readline()
        shell("down", *how)
        assert scheduler.poll() == 0


def test_impossible_jobs_are_refused(shell: Shell) -> None:
    shell.up()
    client = shell.client()
    with pytest.raises(UsageError, match="asks for 2 devices of 1"):
        client.submit(["--", "true"], devices=2)
    with pytest.raises(UsageError, match="name has to be up to 64 letters"):
        client.submit(["--", "true"], name="../x")
    assert "vmm is for GPUs only" in shell("submit", "--route", "vmm", "--", "true", code=2)
    assert client.submit(["--", "true"], name="x") == "x"
    with pytest.raises(UsageError, match="a job 'x' already"):
        client.submit(["--", "true"], name="x")
    assert [job.id for job in client.jobs()] == ["x"]
    shell("down")


def test_garbage_and_a_silent_client_disturb_nobody(shell: Shell) -> None:
    shell.up()
    context = zmq.Context()
    with context, context.socket(zmq.DEALER) as silent, context.socket(zmq.DEALER) as noisy:
        for stranger in (silent, noisy):
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(f"ipc://{shell.directory / 'client.sock'}")
        for frames in ([b"9", b"x"], [b"\xff"], [b"1", b"\xff"], [b"a", b"b", b"c"]):
            noisy.send_multipart(frames)
            assert noisy.poll(PATIENCE_MS)
            assert isinstance(verbs.decode_answer(noisy.recv_multipart()), verbs.Failed)
        job = shell.submit(20)
        assert shell.client().wait(job, PATIENCE_S) is not None
    shell("down")


def test_the_commands_do_without_torch() -> None:
    code = (
        "import sys; from gpuslice.cli import COMMANDS, application; "
        "application.build({name: COMMANDS[name] for name in "
        "['up', 'submit', 'ps', 'logs', 'wait', 'cancel', 'suspend', 'resume', 'events', 'down']}); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S, check=False).returncode == 0


def test_migrate_and_weight_reach_the_job(shell: Shell) -> None:
    shell.up("--devices", "null:2")
    client = shell.client()
    job = shell.submit(10**6)
    until(client, job, lambda info: info.devices == ("null:0",) and info.state == "running")
    shell("migrate", job, "--to", "null:1")
    found = until(client, job, lambda info: info.devices == ("null:1",) and info.state == "running")
    assert (found.migrations, found.moving_to) == (1, ())
    assert "no device 'null:5'" in shell("migrate", job, "--to", "null:5", code=2)
    shell("weight", job, "2.5")
    assert until(client, job, lambda info: info.weight == 2.5)
    assert "'much' is not a weight" in shell("weight", job, "much", code=2)
    events = [json.loads(line) for line in shell("events", "--json").splitlines()]
    told = [event["details"] for event in events if event["what"] in ("moved", "weighted")]
    assert told == [{"devices": "null:1"}, {"weight": 2.5}]
    shell("down")


def test_max_steps_end_a_job_well(shell: Shell) -> None:
    shell.up()
    client = shell.client()
    words = ["--", sys.executable, str(RANK), str(10**6), "0"]
    job = client.submit(words, max_steps=30, environ={**os.environ, "WORLD": "1"})
    shell("wait", job, "--timeout", "60s")
    found = next(one for one in client.jobs() if one.id == job)
    assert found.state == "succeeded"
    assert found.steps >= 30
    shell("down")


def test_quotas_and_memory_are_limits(shell: Shell) -> None:
    shell.up("--devices", "null:2", "--quota", "t=1")
    client = shell.client()
    words = ["--", sys.executable, str(RANK), str(10**6), "0"]
    environ = {**os.environ, "WORLD": "1"}
    first = client.submit(words, tenant="t", device_memory_bytes=5, environ=environ)
    until(client, first, lambda info: info.state == "running")
    # Only now: the quota goes to whichever process says hello first.
    second = client.submit(words, tenant="t", device_memory_bytes=5, environ=environ)
    found = until(client, second, lambda info: info.fair_share_delay_s > 0)
    assert (found.state, found.memory_bytes) == ("queued", 5)
    assert found.waited_s == pytest.approx(found.fair_share_delay_s, abs=0.1)
    with pytest.raises(UsageError, match="quota of tenant t is 1"):
        client.submit(["--", "true"], tenant="t", devices=2)
    client.cancel(first)
    until(client, second, lambda info: info.state == "running")
    shell("down")


def test_jobs_are_told_whose_they_are_and_what_is_their_tenant_s(shell: Shell) -> None:
    shell.up("--tenant-ramdisk", "vision=8G")
    client = shell.client()
    code = "import os; print(os.environ['GPUSLICE_TENANT'], os.environ['GPUSLICE_TENANT_RAMDISK'] or 'all')"
    environ = {**os.environ, "GPUSLICE_TENANT_RAMDISK": "999T"}  # a wish of the owner's is none
    said = []
    for tenant in ("vision", "audio"):
        job = client.submit(["--", sys.executable, "-c", code], tenant=tenant, environ=environ)
        client.wait(job, PATIENCE_S)
        said.append(Path(client.logs(job).out).read_text())
    assert said == ["vision 8G\n", "audio all\n"]
    shell("down")
