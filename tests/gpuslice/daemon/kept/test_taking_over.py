"""Kept jobs go on under a scheduler of another version or with other options: all of them, each once."""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.config import load
from gpuslice.daemon.journal_recovery import open_journal
from gpuslice.daemon.kept import kept_file, taking_over
from gpuslice.daemon.kept.kept_file import Kept, KeptFileError
from gpuslice.daemon.kept.snapshots import KEPT, KeptSnapshots
from gpuslice.daemon.scheduler_setup import Setup
from gpuslice.errors import UsageError
from gpuslice.files import private_directory
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.kept import KeptJob, KeptJobs, Tally
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.journal.journal import FILE, Journal, JournalDamagedError
from gpuslice.sched_core.lifecycle.events import SettingsChanged, Submitted, TakenOver
from gpuslice.sched_core.nodes.local_node import SOCKET
from gpuslice.types import DeviceName

from .test_snapshots import CPU, leave

#: Written by the first version that wrote such files. Each later one reads it.
FORMAT_1 = Path(__file__).parent / "format-1.json"
SETUP = Setup((DeviceName("cpu", 0), DeviceName("cpu", 1)), options={"quantum_s": "2.0"})
OTHER = replace(SETUP, policy="2das", options={}, spill_limit="1G")


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSLICE_RAMDISK_DIR", str(tmp_path / "memory"))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return kept_in(tmp_path / "state")


def kept_in(directory: Path) -> Path:
    """Leave what a scheduler leaves that has kept job a, with a snapshot, and job b, and in which c ended."""
    private_directory(directory, option="--state-dir", parents=True)
    (directory / "logs").mkdir()
    with open_journal(directory, SETUP, accept_loss=False, warn=never) as journal:
        for name in "abc":
            spec = JobSpec(id=name, submit_s=0.5, devices=1 + (name == "b"))
            journal.append(Submitted(spec, Program(("true",), "/")), 1.0, quiet=False)
            (directory / "logs" / f"{name}.out").write_text(f"of {name}")
            (directory / "logs" / f"{name}~1.exit").touch()
    leave(RamDisk.from_settings(load(socket=f"ipc://{directory / SOCKET}")), "a")
    place = KeptSnapshots(directory, SETUP)
    place.store({"a": 1})
    place.note(KeptJobs(jobs=tuple(map(job, "ab"))))
    return directory


def job(name: str) -> KeptJob:
    spec = JobSpec(id=name, submit_s=0.5, devices=1 + (name == "b"), time_limit_s=60.0)
    tally = Tally(attempt=1, relaunches=1, executed_s=7.5)
    keepers, steps = (1, 20) if name == "a" else (0, 0)
    program = Program(("python", "train.py"), "/", {"KEY": "é\n"})
    return KeptJob(spec=spec, program=program, tally=tally, kept_s=30.0, steps=steps, keepers=keepers)


def never(text: str) -> None:
    raise AssertionError(text)


def taken_over(directory: Path, setup: Setup = OTHER, *, accept_loss: bool = False) -> Core:
    """Return the core of the journal that the next scheduler has. Job a finds its snapshot."""
    place, warned = KeptSnapshots(directory, setup), list[str]()
    core = setup.make_core()
    with open_journal(directory, setup, accept_loss=accept_loss, warn=warned.append, kept=place) as journal:
        for event, now in journal.replay():
            core.handle(event, now)
    disk = RamDisk.from_settings(load(socket=f"ipc://{directory / SOCKET}", **spill(place)))
    assert disk.boundaries("a") == {5}
    return core


def spill(place: KeptSnapshots) -> dict[str, str]:
    return {"spill_dir": place.environ["GPUSLICE_SPILL_DIR"]}


def check_whole(directory: Path, core: Core) -> None:
    assert {name: (one.steps_so_far, one.executed_s) for name, one in core.jobs.items()} == {
        "a": (20, 7.5),
        "b": (0, 7.5),
    }
    assert all(one.keep and one.failures == 0 for one in core.jobs.values())
    assert sorted(path.name for path in (directory / "logs").iterdir()) == [
        *("a.out", "a~1.exit", "b.out", "b~1.exit")
    ]
    assert sorted(path.name for path in (directory / "past-1" / "logs").iterdir()) == ["c.out", "c~1.exit"]
    with Journal(directory / "past-1" / FILE, read_only=True) as journal:
        assert [type(event) for event, _ in journal.replay()] == [Submitted] * 3
    assert kept_file.read(directory / "past-1") is not None
    assert kept_file.read(directory) is None
    assert not list(directory.glob("taking-over*"))
    assert not (directory / "past-2").exists()


def test_other_options_begin_a_new_journal_with_the_kept_jobs(state: Path) -> None:
    check_whole(state, taken_over(state))
    assert list(taken_over(state).jobs) == ["a", "b"], "the new journal goes on"


def test_another_version_does_so_too(state: Path) -> None:
    later = replace(SETUP, core_version=SETUP.core_version + 1)
    check_whole(state, taken_over(state, later))


def test_what_was_changed_while_it_ran_holds_on(state: Path) -> None:
    with Journal(state / FILE) as journal:
        journal.append(SettingsChanged(switch_share=0.5), 40.0, quiet=False)
    assert taken_over(state).state.switch_costs.share == 0.5


def test_with_the_same_options_the_journal_goes_on(state: Path) -> None:
    core = SETUP.make_core()
    with open_journal(state, SETUP, accept_loss=False, warn=never) as journal:
        for event, now in journal.replay():
            core.handle(event, now)
    assert list(core.jobs) == ["a", "b", "c"]
    assert not (state / "past-1").exists()
    KeptSnapshots(state, SETUP).begin()
    assert kept_file.read(state) is None
    with pytest.raises(UsageError, match="what differs is: policy"):
        open_journal(state, OTHER, accept_loss=False, warn=never)


class Killed(BaseException):
    """The process ends."""


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many more files may be renamed or removed, and directories flushed, before the process ends."""
    left = [10**6]

    def counted(name: str, module: object) -> None:
        real = getattr(module, name)

        def one(*words: object, **options: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real(*words, **options)

        monkeypatch.setattr(module, name, one)

    for name in ("rename", "replace"):
        counted(name, os)
    counted("rmtree", shutil)
    counted("flush_directory", taking_over)
    return left


def test_a_kill_at_any_moment_loses_nothing_and_nothing_is_there_twice(
    tmp_path: Path, steps: list[int]
) -> None:
    whole = kept_in(tmp_path / "whole")
    cut_short = 0
    for allowed in range(100):
        directory = tmp_path / "state"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(whole, directory, symlinks=True)
        steps[0] = allowed
        try:
            taken_over(directory)
        except Killed:
            cut_short += 1
        else:
            break
        finally:
            steps[0] = 10**6
        check_whole(directory, taken_over(directory))
    assert cut_short >= 12
    check_whole(directory, taken_over(directory))


def test_a_directory_that_was_moved_is_found_by_its_jobs(state: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    state.rename(moved)
    check_whole(moved, taken_over(moved))
    assert len(list((moved / KEPT).glob("a@*.gsnp"))) == 1, "nothing is left under the former name"


def test_snapshots_go_to_another_spill_directory(state: Path, tmp_path: Path) -> None:
    there = tmp_path / "spill"
    check_whole(state, taken_over(state, replace(OTHER, spill_dir=str(there))))
    assert len(list(there.glob("a@*.gsnp"))) == 1
    assert not list((state / KEPT).glob("*.gsnp"))


def test_who_needs_more_devices_than_there_are_is_named_and_all_stay_kept(state: Path) -> None:
    with pytest.raises(UsageError, match=r"job b asks for 2 devices of 1 .*the jobs stay kept"):
        taken_over(state, replace(OTHER, devices=CPU))
    check_whole(state, taken_over(state))


def test_a_damaged_file_is_refused_and_the_journal_has_all(state: Path) -> None:
    path = state / kept_file.FILE
    whole = path.read_bytes()
    for place in range(0, len(whole), len(whole) // 20):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        before = sorted(state.rglob("*"))
        with pytest.raises(KeptFileError, match=r"is damaged|has format"):
            taken_over(state)
        assert [one for one in before if not one.exists()] == []
    warned: list[str] = []
    with open_journal(state, SETUP, accept_loss=False, warn=warned.append) as journal:
        assert len(list(journal.replay())) == 3
    assert "the journal has all jobs" in warned[0]


def test_a_later_format_is_refused_by_name(state: Path) -> None:
    path = state / kept_file.FILE
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":2'))
    with pytest.raises(KeptFileError, match="has format 2, and this gpuslice reads format 1"):
        taken_over(state)


def test_a_damaged_journal_costs_no_kept_job(state: Path) -> None:
    (state / FILE).write_bytes(b"no database at all" * 1000)
    for setup in (SETUP, OTHER):
        with pytest.raises(JournalDamagedError, match=r"kept.json has all 2 kept jobs"):
            taken_over(state, setup)
    core = taken_over(state, SETUP, accept_loss=True)
    assert list(core.jobs) == ["a", "b"]
    assert (state / "past-1" / FILE).read_bytes().startswith(b"no database")


def test_without_a_journal_the_file_is_enough(state: Path) -> None:
    (state / FILE).unlink()
    (state / "journal.head").unlink()
    assert list(taken_over(state, SETUP).jobs) == ["a", "b"]


@pytest.mark.parametrize("setup", [SETUP, OTHER])
def test_a_snapshot_that_is_missing_is_named(state: Path, setup: Setup) -> None:
    (snapshot,) = (state / KEPT).glob("*.gsnp")
    snapshot.unlink()
    with pytest.raises(KeptFileError, match="snapshot of rank 0 of job a is missing"):
        taken_over(state, setup)
    warned: list[str] = []
    open_journal(state, setup, accept_loss=True, warn=warned.append).close()
    assert "snapshot of rank 0 of job a is missing" in warned[0]


def test_the_file_is_for_its_user_alone(state: Path) -> None:
    assert stat.S_IMODE((state / kept_file.FILE).stat().st_mode) == 0o600


def test_a_file_of_format_1_is_read() -> None:
    envelope = msgspec.json.decode(FORMAT_1.read_bytes(), type=dict[str, msgspec.Raw])
    kept = msgspec.json.decode(envelope["kept"], type=Kept)
    (array, gang) = kept.jobs.jobs
    assert (array.spec.id, array.spec.array, array.spec.at_once) == ("sweep-3", "sweep", 2)
    assert (gang.spec.devices, gang.steps, gang.keepers, gang.tally.executed_s) == (2, 120, 2, 61.5)
    assert gang.program.argv[0] == "python"
    event = TakenOver(kept.jobs, kept.unix_s)
    core = replace(SETUP, policy="las", options={}).make_core()
    core.handle(event, 5000.0)
    core.check()
    assert [one.failures for one in core.jobs.values()] == [0, 1]
