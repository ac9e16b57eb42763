"""Going on from a damaged journal: refused by name, or with what is whole, and nothing is thrown away."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gpuslice.daemon.journal_recovery import continued, former_changes, open_journal
from gpuslice.daemon.replay import JournalReplay
from gpuslice.daemon.scheduler_setup import Setup
from gpuslice.errors import ConfigError, EnvironmentUnusableError
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.journal.journal import FILE, Journal, JournalDamagedError
from gpuslice.sched_core.lifecycle.events import Cancelled, Exited, Reported, SettingsChanged, Submitted
from gpuslice.sched_core.nodes import exit_record
from gpuslice.types import DeviceName

SETUP = Setup((DeviceName("null", 0),))


def refuse_to_warn(text: str) -> None:
    raise AssertionError(text)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A scheduler's, whose log of SQLite is lost: a is known, b and c only by their logs, and c runs."""
    (tmp_path / "logs").mkdir()
    journal = open_journal(tmp_path, SETUP, accept_loss=False, warn=refuse_to_warn)
    for name in "abc":
        spec = JobSpec(id=name, submit_s=0.0)
        journal.append(Submitted(spec, Program(("true",), "/")), 1.0, quiet=False)
        if name == "a":
            journal._fresh = 10**6
            journal.tidy_up()
        (tmp_path / "logs" / f"{name}.out").write_text(f"of {name}")
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    journal.close()
    for name, data in left.items():
        (tmp_path / name).write_bytes(data)
    wal = bytearray(left[f"{FILE}-wal"])
    wal[200] ^= 1  # in its first page, so nothing of it counts
    (tmp_path / f"{FILE}-wal").write_bytes(wal)
    (tmp_path / f"{FILE}-shm").unlink()
    return tmp_path


@pytest.fixture
def running(directory: Path) -> int:
    """Records of all; that of c is locked."""
    for name in "ab":
        os.close(exit_record.create(directory / "logs" / f"{name}.exit"))
    return exit_record.create(directory / "logs" / "c.exit")


def test_what_is_missing_is_named_and_nothing_is_touched(directory: Path, running: int) -> None:
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    with pytest.raises(JournalDamagedError) as caught:
        open_journal(directory, SETUP, accept_loss=False, warn=refuse_to_warn)
    said = str(caught.value)
    assert "1 events are whole, at least 2 are missing" in said
    assert "logs of jobs that it does not know: b, c (still running: processes " in said
    after = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    assert {path: data for path, data in after.items() if not path.name.endswith("-shm")} == before


def test_if_told_so_it_goes_on_with_what_is_whole_and_keeps_the_rest(directory: Path, running: int) -> None:
    damaged = (directory / f"{FILE}-wal").read_bytes()
    warned: list[str] = []
    with open_journal(directory, SETUP, accept_loss=True, warn=warned.append) as journal:
        known = [event.spec.id for event, _ in journal.replay() if isinstance(event, Submitted)]
        assert known == ["a"]
    assert len(warned) == 1
    assert str(directory / "past-1") in warned[0]
    assert (directory / "past-1" / f"{FILE}-wal").read_bytes() == damaged
    assert (directory / "logs" / "c.out").read_text() == "of c"
    with open_journal(directory, SETUP, accept_loss=False, warn=refuse_to_warn) as journal:
        assert len(list(journal.replay())) == len(known)
    assert {path.name for path in directory.iterdir()} >= {FILE, "journal.head", "logs", "past-1"}
    assert not list(directory.glob("salvaged*"))


def test_whatever_is_left_of_a_main_file_is_used(directory: Path) -> None:
    (directory / FILE).write_bytes(b"no database at all" * 1000)
    with pytest.raises(JournalDamagedError):
        open_journal(directory, SETUP, accept_loss=False, warn=refuse_to_warn)
    warned: list[str] = []
    with open_journal(directory, SETUP, accept_loss=True, warn=warned.append) as journal:
        assert list(journal.replay()) == []
    assert "0 events are whole" in warned[0]


def test_a_main_file_that_is_gone_is_an_error_like_any_damage(directory: Path, running: int) -> None:
    for path in directory.glob(f"{FILE}*"):
        path.unlink()
    with pytest.raises(JournalDamagedError, match="at least 3 are missing; there are logs") as caught:
        open_journal(directory, SETUP, accept_loss=False, warn=refuse_to_warn)
    assert caught.value.exit_code == 4
    warned: list[str] = []
    with open_journal(directory, SETUP, accept_loss=True, warn=warned.append) as journal:
        assert list(journal.replay()) == []
    assert (directory / "past-1" / "journal.head").exists()
    assert (directory / "logs" / "b.out").read_text() == "of b"


def test_a_journal_of_other_options_is_set_aside_with_its_head(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    open_journal(tmp_path, SETUP, accept_loss=False, warn=refuse_to_warn).close()
    other = Setup((DeviceName("null", 0), DeviceName("null", 1)))
    open_journal(tmp_path, other, accept_loss=False, warn=refuse_to_warn).close()
    with Journal(tmp_path / "past-1" / FILE) as journal:
        assert journal.about() is not None


def test_unfinished_jobs_keep_the_memory_that_they_were_accepted_by(tmp_path: Path) -> None:
    """A new kernel says of the same machine that it has some pages more."""
    (tmp_path / "logs").mkdir()
    before, after = replace(SETUP, device_memory_bytes=1000), replace(SETUP, device_memory_bytes=1001)
    assert continued(tmp_path, after) == after  # there is no journal yet
    with open_journal(tmp_path, before, accept_loss=False, warn=refuse_to_warn) as journal:
        assert continued(tmp_path, before) == before
        assert continued(tmp_path, after) == after  # no job that was accepted
        spec = JobSpec(id="a", submit_s=0.0)
        journal.append(Submitted(spec, Program(("true",), "/")), 1.0, quiet=False)
    assert continued(tmp_path, after) == before
    other = replace(after, switch_share=0.5, spill_limit="1G")
    assert continued(tmp_path, other) == other
    with pytest.raises(ConfigError, match="differs is: switch_share, device_memory_bytes, spill_limit"):
        open_journal(tmp_path, other, accept_loss=False, warn=refuse_to_warn)
    open_journal(tmp_path, continued(tmp_path, after), accept_loss=False, warn=refuse_to_warn).close()


class Declined(msgspec.Struct, tag="declined"):
    """What a rank said to a former core."""

    epoch: int
    error: str


@pytest.fixture
def of_another_core(tmp_path: Path) -> Path:
    """A scheduler's directory whose journal is of the first core, with an event that is none today."""
    (tmp_path / "logs").mkdir()
    fields = msgspec.to_builtins(SETUP) | {"handover": True}
    del fields["core_version"]
    with Journal(tmp_path / FILE) as journal:
        journal.introduce(msgspec.json.encode(fields))
        journal.append(Submitted(JobSpec(id="a", submit_s=0.0), Program(("true",), "/")), 1.0, quiet=False)
        journal.append(Reported("a", 0, Declined(2, "not now")), 2.0, quiet=False)  # type: ignore[arg-type]
    return tmp_path


def test_unfinished_jobs_of_another_core_are_refused_by_name(of_another_core: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"\(a\), and another version .* \(core 1; .*\(with the version that wrote it, drain it",
    ):
        open_journal(of_another_core, SETUP, accept_loss=False, warn=refuse_to_warn)
    with pytest.raises(EnvironmentUnusableError, match="another version of gpuslice wrote the journal"):
        JournalReplay(of_another_core / FILE)


def test_a_journal_of_another_core_is_set_aside_once_its_jobs_have_ended(of_another_core: Path) -> None:
    with Journal(of_another_core / FILE) as journal:
        journal.append(Cancelled("a", "drained"), 3.0, quiet=False)
        journal.append(Exited("a", -15), 4.0, quiet=False)
    open_journal(of_another_core, SETUP, accept_loss=False, warn=refuse_to_warn).close()
    assert (of_another_core / "past-1" / FILE).exists()


def test_what_was_changed_while_it_ran_is_no_difference(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    wanted = replace(SETUP, policy="fifo", switch_share=0.5)
    with open_journal(tmp_path, SETUP, accept_loss=False, warn=refuse_to_warn) as journal:
        journal.append(Submitted(JobSpec(id="a", submit_s=0.0), Program(("true",), "/")), 1.0, quiet=False)
        assert former_changes(tmp_path) == []
        assert continued(tmp_path, wanted) == wanted
        change = SettingsChanged("las", {"quantum_s": "3"})
        journal.append(change, 2.0, quiet=False)
    assert former_changes(tmp_path) == [change]
    assert continued(tmp_path, replace(SETUP, policy="fifo", device_memory_bytes=9)) == SETUP
    assert continued(tmp_path, wanted) == wanted, "the switch share was not changed"
    with pytest.raises(ConfigError, match=r"what differs is: .*switch_share"):
        open_journal(tmp_path, wanted, accept_loss=False, warn=refuse_to_warn)
