"""What can be read of a scheduler that does not run, of one elsewhere, and of another user's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpuslice.cli import client_commands, main
from gpuslice.client.client import Client
from gpuslice.errors import EnvironmentUnusableError, NoSchedulerError, UsageError

from .conftest import Shell
from .waiting import until

NOBODY = "gpuslice: no scheduler runs in {}: this is from its journal; its last event is of 20"


def test_its_jobs_events_and_logs_can_be_read_after_it_was_killed(
    shell: Shell, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shell.up()
    client = shell.client()
    client.submit(["--", "bash", "-c", "echo out; echo err >&2; exit 3"], name="done")
    client.wait("done")
    client.submit(["--", "bash", "-c", "echo begun; sleep 1000"], name="alive")
    until(client, "alive", lambda info: bool(client.read_log("alive")))
    before = {job.id: job.state for job in client.jobs()}
    shell.kill()
    capfd.readouterr()

    def read(*words: str, code: int = 0) -> str:
        with pytest.raises(SystemExit, match=str(code)):
            main([*words, "--state-dir", str(shell.directory)])
        out, err = capfd.readouterr()
        assert err.startswith(NOBODY.format(shell.directory)), err
        return out

    found = json.loads(read("ps", "--json"))
    assert {job["id"]: job["state"] for job in found["jobs"]} == before
    assert found["pid"] == 0
    assert re.search(r"done +- +failed", read("ps"))
    page = read("show", "done")
    assert re.search(r"state +failed\n", page)
    assert re.search(r"attempt 1 +began .* ago, took .* s, exit code 3: user: ", page)
    assert page.endswith("its last lines on stdout:\n  out\n\nits last lines on stderr:\n  err\n")
    assert read("logs", "done") == read("logs", "-f", "done") == "out\n"
    assert read("logs", "--err", "done") == "err\n"
    assert read("logs", "alive") == read("logs", "-f", "alive", code=3) == "begun\n"
    assert json.loads(read("logs", "--json", "done"))["out"] == str(shell.directory / "logs" / "done.out")
    assert "submitted" in read("events")
    assert read("wait", "done", code=3) == ""
    assert read("wait", "alive", code=3) == ""
    assert read("logs", "other", code=2) == ""
    with pytest.raises(SystemExit, match="0"):
        main(["timeline", "--out", str(tmp_path / "run.json"), "--state-dir", str(shell.directory)])
    assert "no scheduler runs" in capfd.readouterr().err
    shell.up()
    assert {job.id: job.state for job in client.jobs()} == before
    shell("down")


def test_where_there_never_was_one_nothing_can_be_read(tmp_path: Path) -> None:
    for ask in (
        lambda: client_commands.ps(state_dir=tmp_path),
        lambda: client_commands.logs("a", state_dir=tmp_path),
        lambda: client_commands.events(state_dir=tmp_path),
    ):
        with pytest.raises(NoSchedulerError, match=f"no scheduler runs in {tmp_path} "):
            ask()


@pytest.mark.parametrize("named", ["flag", "environment"])
def test_a_timeline_of_a_scheduler_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    keys = tmp_path / "keys"
    with pytest.raises(SystemExit, match="0"):
        main(["keys", "new", str(keys)])
    elsewhere = ["--connect", "tcp://127.0.0.1:7", "--curve-keys", str(keys)]
    monkeypatch.setenv("GPUSLICE_STATE_DIR", str(tmp_path))
    for name, value in (("CONNECT", elsewhere[1]), ("CURVE_KEYS", str(keys))):
        monkeypatch.setenv(f"GPUSLICE_{name}", value)
    out = tmp_path / "run.json"
    with pytest.raises(SystemExit, match="2"):
        main([*(elsewhere if named == "flag" else []), "timeline", "--out", str(out)])
    assert "on the scheduler's machine" in capsys.readouterr().err
    assert not out.exists()
    if named == "flag":
        for words in (["ramdisk", "ls"], ["up"], ["ps", "--state-dir", str(tmp_path)]):
            with pytest.raises(SystemExit, match="2"):
                main([*elsewhere, *words])
            assert "127.0.0.1:7" in (said := capsys.readouterr().err) or "--connect is not for" in said


def test_the_log_of_a_scheduler_elsewhere_that_has_left_is_not_looked_for_here(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    shell("keys", "new", str(keys))
    shell.up("--bind", "tcp://127.0.0.1:*", "--curve-keys", str(keys))
    endpoint = shell.status().endpoints[1]
    shell.client().submit(["--", "true"], name="a")
    shell.client().wait("a")
    monkeypatch.setenv("GPUSLICE_CONNECT", endpoint)
    monkeypatch.setenv("GPUSLICE_CURVE_KEYS", str(keys))

    def leave(client: Client, job: str, timeout_s: float | None = None) -> object:
        shell("down", "--state-dir", str(shell.directory))
        (shell.directory / "logs" / "a.out").write_text("of another")
        raise EnvironmentUnusableError("it has left")

    monkeypatch.setattr(Client, "wait", leave)
    with pytest.raises(EnvironmentUnusableError, match="it has left"):
        client_commands.logs("a", follow=True)
    assert "of another" not in capfd.readouterr().out


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("words", [["ps"], ["logs", "a"], ["events"], ["timeline", "--out", "x.json"]])
def test_another_users_directory_is_named(tmp_path: Path, words: list[str]) -> None:
    directory = tmp_path / "theirs" / "state"
    directory.mkdir(parents=True)
    (directory / "journal.sqlite").touch()
    directory.parent.chmod(0o700)
    for path in (tmp_path, *tmp_path.parents):
        if not path.stat().st_mode & 0o001:  # the tests' own
            path.chmod(path.stat().st_mode | 0o011)
    as_nobody = (
        "import os, sys\nfrom contextlib import suppress\nfrom gpuslice.cli import client_commands, main\n"
        "from gpuslice.daemon import run_timeline\n"
        "with suppress(SystemExit): main(['timeline', '--help'])\n"  # all that is needed is imported
        "os.setuid(4711)\nmain(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", as_nobody, *words, "--state-dir", str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert f"gpuslice: permission denied: {directory} ({directory.parent} belongs to user 0)" in done.stderr


def test_a_working_directory_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setenv("PWD", str(gone))
    gone.rmdir()
    with Client(tmp_path / "s") as client:
        for ask in (
            lambda: client.submit(["train.py"]),
            lambda: client.submit(["--", "true"]),
            lambda: client_commands.ps(state_dir="s"),
        ):
            with pytest.raises(UsageError, match=f"the working directory {gone} is gone"):
                ask()


def test_a_jobs_working_directory_that_is_gone_is_named(shell: Shell, tmp_path: Path) -> None:
    shell.up()
    client = shell.client()
    job = client.submit(["--", "true"], directory=str(tmp_path / "gone"))
    ended = client.wait(job)
    assert ended is not None
    assert f"its working directory {tmp_path / 'gone'} cannot be entered: No such file" in ended.reason
    shell("down")
