"""``submit --on-end`` and ``--notify``, over a scheduler that is killed before it has delivered."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpuslice.client.client import Client
from gpuslice.verbs import JobInfo

from ..patience import PATIENCE_S
from .conftest import RANK, Shell

SECRET = "t0ken"


class Hook:
    """A server for messages, which answers none before it is told to."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.asked, self.answers = threading.Semaphore(0), threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                outer.asked.release()
                outer.answers.wait(PATIENCE_S)
                with suppress(OSError):  # who asked may have been killed
                    self.send_response(200)
                    self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/{SECRET}"


@pytest.fixture
def hook() -> Iterator[Hook]:
    found = Hook()
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    found.answers.set()
    found.server.shutdown()
    found.server.server_close()
    thread.join()


def when_delivered(client: Client, job: str) -> JobInfo:
    """The job, once nothing is owed of it."""
    ends_s = time.monotonic() + PATIENCE_S
    while True:
        (found,) = [one for one in client.jobs() if one.id == job]
        if all(one.state in ("done", "given up") for one in found.at_end):
            return found
        assert time.monotonic() < ends_s, found
        time.sleep(0.05)


def test_what_a_killed_scheduler_owed_is_done_by_the_next_one(
    shell: Shell, tmp_path: Path, hook: Hook
) -> None:
    told, go = tmp_path / "told", tmp_path / "go"
    tells = 'echo "$GPUSLICE_JOB $GPUSLICE_STATE $GPUSLICE_EXIT_CODE $GREETING" >> ' + str(told)
    shell.up()
    client = shell.client()
    job = client.submit(
        ["--", sys.executable, str(RANK), "5", "0"],
        tenant="ann",
        env={"GREETING": "hello"},
        on_end=f": {SECRET}; while [ ! -e {go} ]; do sleep 0.05; done; {tells}",
        notify=hook.url,
    )
    assert hook.asked.acquire(timeout=PATIENCE_S)
    shell.kill()
    assert not told.exists()
    hook.answers.set()
    go.touch()

    shell.up()
    client = shell.client()
    assert hook.asked.acquire(timeout=PATIENCE_S), "the next scheduler tries again"
    info = when_delivered(client, job)
    assert [(one.what, one.state) for one in info.at_end] == [("on_end", "done"), ("notify", "done")]
    assert set(told.read_text().splitlines()) == {f"{job} succeeded 0 hello"}
    first, *_, last = hook.got
    assert first == last
    assert {key: last[key] for key in ("id", "array", "state", "exit_code", "reason", "tenant")} == {
        "id": job,
        "array": None,
        "state": "succeeded",
        "exit_code": 0,
        "reason": "",
        "tenant": "ann",
    }
    assert 0 < last["began_unix_s"] <= last["ended_unix_s"]
    assert last["service_s"] >= 0
    shown = [shell("show", job), shell("events"), shell("events", "--json"), shell("ps", "--json")]
    shown += [path.read_text() for path in shell.directory.glob("scheduler.jsonl*")]
    assert "on end" in shown[0]
    assert not [text for text in shown if SECRET in text]
    shell("down")


def test_down_waits_for_the_first_try_and_gives_up_the_rest(shell: Shell, tmp_path: Path) -> None:
    shell.up()
    never = tmp_path / "never"
    words = ["--", sys.executable, str(RANK), str(never), "0"]
    command = f'echo "$GPUSLICE_STATE" >> {tmp_path / "told"}; exit 7'
    job = shell.client().submit(words, on_end=command)
    shell("down")
    assert (tmp_path / "told").read_text() == "cancelled\n"
    (info,) = [one for one in shell.status().jobs if one.id == job]
    (end,) = info.at_end
    assert (end.state, end.reason) == ("given up", "exit code 7")


def test_a_url_of_another_kind_is_refused_without_repeating_it(shell: Shell) -> None:
    shell.up()
    for url in ("file:///etc/t0ken", "https:///t0ken", "http://t0ken:pw@host/", "http://h:x/t0ken"):
        said = shell("submit", "--notify", url, "--", "true", code=2)
        assert "--notify" in said
        assert SECRET not in said
    shell("down")
