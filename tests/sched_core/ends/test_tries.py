"""One try: the command's end, output and limit; the message's answer. No failure tells a secret."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from gpuslice.sched_core.ends.tries import post, run

from ...patience import PATIENCE_S


class Hook(BaseHTTPRequestHandler):
    """Answers with the status that the path names."""

    got: list[bytes]

    def do_POST(self) -> None:
        self.got.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(int(self.path[1:4]))
        self.send_header("Location", "/200")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[str]:
    Hook.got = []
    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_command_is_run_in_a_shell_with_directory_and_variables(tmp_path: Path) -> None:
    output = tmp_path / "a.end"
    command = 'echo "$WHO is in $(pwd)"; echo wrong >&2'
    assert run(command, {"WHO": "a", "PATH": "/usr/bin:/bin"}, str(tmp_path), output, PATIENCE_S) == ""
    assert run("exit 3", {}, str(tmp_path), output, PATIENCE_S) == "exit code 3"
    assert output.read_text() == f"a is in {tmp_path}\nwrong\n"


def test_a_command_is_not_among_the_arguments_of_processes(tmp_path: Path) -> None:
    output = tmp_path / "a.end"
    assert run("tr '\\0' ' ' < /proc/$$/cmdline", {"PATH": "/usr/bin:/bin"}, "/", output, PATIENCE_S) == ""
    assert output.read_text().split() == ["/bin/sh", "-c", "eval", '"$GPUSLICE_ON_END"']


def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    output = tmp_path / "a.end"
    command = "sleep 3600 & echo $!; trap '' TERM; wait; sleep 3600"
    assert run(command, {"PATH": "/usr/bin:/bin"}, "/", output, 0.2) == "it was ended after 0.2 s"
    # Nothing has the output open any more, or the next try would not get it within the limit.
    assert run("exit 4", {}, "/", output, PATIENCE_S) == "exit code 4"


def test_a_command_that_cannot_be_started_says_why(tmp_path: Path) -> None:
    output = tmp_path / "a.end"
    told = run("true", {}, str(tmp_path / "gone"), output, PATIENCE_S)
    assert told == f"it cannot be started: No such file or directory: {tmp_path / 'gone'}"
    assert "secret" not in run("secret" * 10**6, {}, "/", output, PATIENCE_S)


def test_a_message_is_sent(hook: str) -> None:
    assert post(f"{hook}/204", b'{"id":"a"}', PATIENCE_S) == ""
    assert Hook.got == [b'{"id":"a"}']


@pytest.mark.parametrize("status", [302, 404, 500])
def test_another_status_is_a_failure_and_no_redirection_is_followed(hook: str, status: int) -> None:
    assert post(f"{hook}/{status}", b"{}", PATIENCE_S) == f"HTTP status {status}"
    assert len(Hook.got) == 1


def test_a_server_that_is_not_there_is_a_failure_without_the_url() -> None:
    told = post("http://127.0.0.1:1/secret", b"{}", PATIENCE_S)
    assert told == "Connection refused"
