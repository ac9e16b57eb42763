"""Values that nobody can mean: one clear error by the command, and the scheduler never hears of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuslice.cli import main
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.journal.journal import FILE, Journal
from gpuslice.sched_core.lifecycle.events import Submitted

from ..patience import PATIENCE_S
from .conftest import Shell

HUGE = "9" * 400


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("submit", "--memory", HUGE, "--", "true"), "is too large a size"),
        (("submit", "--steps", "1" + "0" * 30, "--", "true"), "steps has to be a whole number <="),
        (("submit", "--weight", "nan", "--", "true"), "weight has to be a number"),
        (("submit", "--deadline", "1" + "0" * 320, "--", "true"), "is too long a time"),
        (("submit", "--tenant", "a=b", "--", "true"), "tenant has to be UTF-8 text without '='"),
        (
            ("submit", "--env", "A=caf\udce9", "--", "true"),
            "the variable A is 'caf\\udce9', which is not UTF-8 text",
        ),
        (("submit", "--", "true", "caf\udce9"), "'caf\\udce9' is not UTF-8 text"),
        (("wait", "x", "--timeout", "1" + "0" * 320), "is too long a time"),
        (("weight", "x", "1e400"), "weight has to be a number <="),
        (("migrate", "x", "--to", "cpu:" + HUGE), "devices[0] has to be no longer than 64"),
        (("up", "--foreground", "--ramdisk-limit", HUGE), "is too large a size"),
        (("up", "--foreground", "--tenant-ramdisk", f"a={HUGE}"), "is too large a size"),
        (("up", "--foreground", "--quota", "a=²"), "is not TENANT=DEVICES"),
        (("up", "--foreground", "--quantum", HUGE), "is too long a time"),
        (("up", "--foreground", "--bind", f"tcp://h:{HUGE * 20}"), "is no TCP endpoint"),
        (("up", "--foreground", "--state-dir", "/tmp/caf\udce9"), "'/tmp/caf\\udce9' is not UTF-8 text"),
        (("ps", "--state-dir", "/tmp/caf\udce9"), "'/tmp/caf\\udce9' is not UTF-8 text"),
        (("up", "--foreground", "--quota", "caf\udce9=1"), "a name in quotas has to be UTF-8 text"),
        (
            ("up", "--foreground", "--tenant-ramdisk", "caf\udce9=1G"),
            "a name in tenant_ramdisk has to be UTF-8",
        ),
        (("up", "--foreground", "--policy", "chronus", "--set", "lease_s=1e308"), "is no length of a lease"),
        (("demo", "--quantum", HUGE), "is not a time"),
        (("run", "--ramdisk-limit", HUGE, "x.py"), ""),
    ],
)
def test_a_wrong_value_is_refused_by_name(
    words: tuple[str, ...],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GPUSLICE_STATE_DIR", str(tmp_path / "s"))
    monkeypatch.setattr("gpuslice.client.connection.LocalConnection.check_listener", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_a_trace_that_is_nested_too_deeply_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "log.json"
    trace.write_text("[" * 100_000)
    with pytest.raises(SystemExit) as ended:
        main(["sim", str(trace), "--cluster", "1x1", "--format", "philly"])
    assert ended.value.code == 2
    assert "is no JSON" in capsys.readouterr().err


def test_a_variable_that_is_not_utf8_and_a_directory_that_is_gone_are_named(
    shell: Shell, tmp_path: Path
) -> None:
    shell.up()
    environ = os.environb | {b"GPUSLICE_STATE_DIR": os.fsencode(shell.directory)}
    command = [sys.executable, "-m", "gpuslice", "submit", "--", "true"]
    told = subprocess.run(command, env={**environ, b"NAME": b"caf\xe9"}, capture_output=True, check=False)
    assert (told.returncode, told.stderr.splitlines()[0]) == (
        2,
        rb"gpuslice: the variable NAME is 'caf\udce9', which is not UTF-8 text",
    )
    gone = f"mkdir {tmp_path}/gone; cd {tmp_path}/gone; rmdir {tmp_path}/gone; {' '.join(command)}"
    told = subprocess.run(["/bin/sh", "-c", gone], env=environ, capture_output=True, check=False)
    assert told.returncode == 2
    assert told.stderr.splitlines()[-2] == f"gpuslice: the working directory {tmp_path}/gone is gone".encode()
    job = shell("submit", "--deadline", "700h", "--", "true").strip()
    shell("wait", job, "--timeout", "60s")
    assert [info.state for info in shell.client().jobs()] == ["succeeded"]
    shell("down")


def test_up_goes_on_from_a_journal_with_events_that_nobody_may_have_written(shell: Shell) -> None:
    shell.up()
    job = shell.submit(10)
    shell("wait", job)
    shell.kill()
    with Journal(shell.directory / FILE) as journal:
        for environ in ({"A=B": "c"}, {"A": "\0"}):
            journal.append(
                Submitted(JobSpec(id="bad", submit_s=0.0), Program(("true",), "/", environ)), 1e6, quiet=False
            )
    told = subprocess.run(
        [sys.executable, "-m", "gpuslice", "up", "--devices", "null:1", "--quantum", "100ms"],
        env={**os.environ, "GPUSLICE_STATE_DIR": str(shell.directory)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    (line,) = told.stderr.splitlines()
    assert "2 of the journal's events were set aside, the first is number" in line
    assert "a name in program.environ has to be UTF-8 text without '='" in line
    assert [info.id for info in shell.client().jobs()] == [job]
    assert shell("events").count("set_aside") == 2
    shell.kill()
    assert shell("up", "--devices", "null:1", "--quantum", "100ms").startswith("scheduler ")
    assert shell("events").count("set_aside") == 2, "told once"
    shell("down")
