"""Deadlines, from outside: guaranteed, refused, and kept over the death of the scheduler."""

from __future__ import annotations

import sys

import pytest

from .conftest import RANK, Shell
from .waiting import until


@pytest.mark.slow
def test_a_deadline_is_guaranteed_or_the_job_refused(shell: Shell) -> None:
    options = ("--devices", "null:1", "--policy", "chronus", "--quantum", "500ms")
    shell("up", *options)
    job = [sys.executable, str(RANK)]
    told = shell("submit", "--deadline", "1m", "--guaranteed", "--", *job, "9999", "0", code=2)
    assert "state it: --steps N" in told
    wish = ("--deadline", "1h", "--guaranteed", "--steps", "5000", "--name", "kept")
    assert shell("submit", *wish, "--", *job, "5000", "0") == "kept\n"
    too_much = ("--deadline", "1m", "--guaranteed", "--steps", "1000000", "--name", "huge")
    told = shell("submit", *too_much, "--", *job, "1000000", "0", code=2)
    assert "huge was refused: its deadline cannot be guaranteed: it needs about" in told
    assert "give it more time, or leave out --guaranteed" in told
    shell.kill()
    shell("up", *options)
    client = shell.client()
    kept = until(client, "kept", lambda info: info.guaranteed is not None)
    assert (kept.guaranteed, kept.deadline_s, kept.deadline_missed) == (True, 3600.0, False)
    shell("wait", "kept")
    found = {one.id: (one.state, one.guaranteed) for one in client.jobs()}
    assert found == {"kept": ("succeeded", True), "huge": ("cancelled", False)}
    rows = [line.split("\t") for line in shell("ps", "--wide").splitlines()]
    column = rows[0].index("DEADLINE")
    assert rows[1][column] == "met, guaranteed"
    what = [event.what for event in client.events() if event.job == "huge"]
    assert "stopped" in what
    shell("down")


def test_what_its_owner_expects_decides_before_a_step_is_made(shell: Shell) -> None:
    shell("up", "--devices", "null:1", "--policy", "chronus", "--quantum", "500ms")
    job = ("--", sys.executable, str(RANK), "1000000", "0")
    wish = ("--deadline", "1h", "--guaranteed", "--duration")
    told = shell("submit", *wish, "2h", "--name", "long", *job, code=2)
    assert "long was refused: its deadline cannot be guaranteed: it needs about 7920 s" in told
    assert shell("submit", *wish, "5m", "--name", "short", *job) == "short\n"
    events = list(shell.client().events())
    assert [event.job for event in events if event.what in ("stopped", "guaranteed")] == ["long", "short"]
    assert "first_step" not in {event.what for event in events}
    assert "is not a time" in shell("submit", *wish, "soon", *job, code=2)
    shell("down")


def test_whoever_ends_before_it_is_decided_was_not_accepted(shell: Shell) -> None:
    shell("up", "--devices", "null:1", "--policy", "chronus")
    wish = ("--deadline", "1h", "--guaranteed", "--steps", "9", "--", sys.executable, "-c", "1/0")
    told = shell("submit", "--name", "broken", *wish, code=2)
    assert "broken failed before its deadline could be guaranteed: ZeroDivisionError" in told
    shell("down")


def test_other_policies_refuse_to_guarantee_and_tell_of_what_was_missed(shell: Shell) -> None:
    shell.up()
    job = ("--", sys.executable, str(RANK), "1000000", "0")
    wish = ("--deadline", "1m", "--guaranteed", "--steps", "9")
    assert "start the scheduler with --policy chronus" in shell("submit", *wish, *job, code=2)
    name = shell("submit", "--deadline", "10ms", *job).strip()
    client = shell.client()
    until(client, name, lambda info: bool(info.deadline_missed))
    assert [event.job for event in client.events() if event.what == "deadline_missed"] == [name]
    assert "is not a time" in shell("submit", "--deadline", "soon", *job, code=2)
    shell("down")
