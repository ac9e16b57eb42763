"""What the agents on other nodes are told, and how they end; nobody asks Ray."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from gpuslice.clock import MonotonicClock
from gpuslice.daemon import other_nodes
from gpuslice.daemon.other_nodes import OtherNodes
from gpuslice.errors import EnvironmentUnusableError, UsageError
from gpuslice.nodes.plan import Answer, Found, Host, Remark, Wanted

from ...patience import PATIENCE_S

NODES = (Found("", "1", "head", "127.0.0.1"), Found("b", "2", "b", "127.0.0.1"))


def told(directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a scheduler tells the agent on b that its logs are known by."""
    asked: list[Wanted] = []

    def ask(others: OtherNodes, word: str, wanted: Wanted, limit_s: float = 0.0) -> Answer:
        asked.append(wanted)
        return Answer(NODES)

    monkeypatch.setattr(OtherNodes, "_ask", ask)
    others = OtherNodes(directory, ["cpu:0"], ray="auto")
    remote = others.open(MonotonicClock())
    others.begin(lambda text: None)
    remote.close()
    return asked[-1].agents["b"].logs


def test_agents_hear_whether_the_logs_are_those_of_the_scheduler_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "s"
    first = told(directory, monkeypatch)
    assert first
    assert told(directory, monkeypatch) == first
    (directory / "logs").rename(directory / "past-1")
    assert told(directory, monkeypatch) not in ("", first)


def test_agents_connect_to_the_port_that_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OtherNodes, "_ask", lambda others, word, wanted: Answer(NODES))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    others = OtherNodes(
        tmp_path / "s", ["cpu:0"], ray="auto", listen=other_nodes.listener(f"127.0.0.1:{port}")
    )
    remote = others.open(MonotonicClock())
    assert remote.endpoint == f"tcp://127.0.0.1:{port}"
    remote.close()


@pytest.mark.parametrize("port", ["host", "host:", "0x10", "10.0.0.5:99999"])
def test_what_is_no_port_for_agents_is_refused(port: str) -> None:
    with pytest.raises(UsageError):
        other_nodes.listener(port)


def test_options_that_need_other_nodes_are_refused_without_any() -> None:
    for named in ((1, (), ""), (0, ("b",), ""), (0, (), "7000")):
        with pytest.raises(UsageError, match="needs other nodes"):
            other_nodes.refuse_without_nodes(*named)


def test_agents_that_have_begun_are_ended_if_no_node_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    taken = Remark("", "Ray does not give node head to gpuslice", "`ray status` shows who has its devices")

    def ask(others: OtherNodes, word: str, wanted: Wanted, limit_s: float = 0.0) -> Answer:
        asked.append(word)
        return Answer(NODES[1:], (taken,)) if word == "begin" else Answer(NODES)

    monkeypatch.setattr(OtherNodes, "_ask", ask)
    others = OtherNodes(tmp_path / "s", ["cpu:0"], ray="auto")
    remote = others.open(MonotonicClock())
    with pytest.raises(EnvironmentUnusableError, match="here: Ray does not give node head"):
        others.begin(lambda text: None)
    assert asked == ["find", "begin", "end"]
    remote.close()


def test_down_ends_although_the_engine_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, hangs = tmp_path / "s", tmp_path / "hangs"
    monkeypatch.setattr(OtherNodes, "_ask", lambda others, word, wanted: Answer(NODES))
    others = OtherNodes(directory, ["cpu:0"], ray="auto")
    remote = others.open(MonotonicClock())
    others.begin(lambda text: None)
    others.bring("j", ("",), ("b",))
    assert (directory / "nodes" / "bring-j.json").exists()
    remote.close()
    monkeypatch.undo()
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(hangs))
    monkeypatch.setattr(other_nodes, "_END_S", 0.1)
    said: list[str] = []
    others.end(said.append)
    assert said == ["what is left of the agents could not be ended: Ray has not answered within 0.1 s"]
    assert not (directory / "node-keys").exists()
    assert not list((directory / "nodes").iterdir())


def test_the_reason_of_a_transfer_is_not_hidden_by_what_ray_prints(tmp_path: Path) -> None:
    asked = msgspec.json.encode(Wanted(hosts=(Host("b", "b"),)))
    said = tmp_path / "said"
    with said.open("wb") as errors:
        errors.write(b"(raylet) The node with node id ...\n")
        errors.flush()
        words = [sys.executable, "-m", "gpuslice.node_agents.agents", "bring", "j"]
        assert subprocess.run(words, input=asked, stderr=errors, check=False).returncode == 2
    assert said.read_text().startswith("['bring', 'j'] is not possible\n")


def test_a_transfer_ends_with_its_scheduler(tmp_path: Path) -> None:
    """It waits for the file that says what to bring: that is a pipe, to which nobody writes."""
    os.mkfifo(tmp_path / "wanted")
    starts = (
        "import subprocess, sys\n"
        "words = [sys.executable, '-m', 'gpuslice.node_agents.agents', 'bring', 'j', sys.argv[1]]\n"
        "print(subprocess.Popen(words).pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", starts, str(tmp_path / "wanted")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as scheduler:
        assert scheduler.stdout is not None
        transfer = psutil.Process(int(scheduler.stdout.readline()))
        with (tmp_path / "wanted").open("wb"):  # it reads
            scheduler.kill()
            gone, _ = psutil.wait_procs([transfer], timeout=PATIENCE_S)
    assert gone
