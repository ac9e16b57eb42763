"""A journal with events that the core rejects: they are set aside by name, the rest goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.journal.event_listing import history
from gpuslice.sched_core.journal.journal import Journal
from gpuslice.sched_core.journal.replay import Replay
from gpuslice.sched_core.lifecycle.events import Event, Held, Submitted, Weighted
from gpuslice.sched_core.policies.rr import RoundRobin

from ..driver import PROGRAM, QUANTUM_S, devices, picture


def make_core() -> Core:
    return Core(devices(1), RoundRobin(quantum_s=QUANTUM_S))


def submitted(job: str, **options: Any) -> Submitted:
    return Submitted(JobSpec(id=job, submit_s=0.0, **options), PROGRAM)


def taken(journal: Journal) -> tuple[Core, Replay]:
    core = make_core()
    replay = Replay(journal, core, make_core)
    for _ in replay.advance():
        core.check()
    return core, replay


def write(journal: Journal, *events: Event) -> None:
    """As an older version may have: nothing is checked."""
    for event in events:
        journal.append(event, 1.0, quiet=False)


def test_what_the_types_of_today_refuse_is_set_aside_and_told_in_the_history(tmp_path: Path) -> None:
    program = Program(("true",), "/", {"A=B": "c"})
    with Journal(tmp_path / "j") as journal:
        write(
            journal,
            submitted("a"),
            Submitted(JobSpec(id="b", submit_s=0.0), program),
            Held("b"),
            submitted("c"),
        )
        core, replay = taken(journal)
        assert list(core.jobs) == ["a", "c"]
        told = [(one.number, one.event, one.job) for one in replay.rejected.values()]
        assert told == [(2, "unreadable", ""), (3, "held", "b")]
        assert "a name in program.environ has to be UTF-8 text without '='" in replay.rejected[2].reason
        assert replay.rejected[3].reason == "there is no job 'b'"
        write(journal, *(one.noted() for one in replay.rejected.values()))
        assert [info.what for info in history(journal, 0).events] == [
            "submitted",
            "unreadable",
            "held",
            "submitted",
            "set_aside",
            "set_aside",
        ]
        again, replay = taken(journal)
        assert not replay.rejected, "it was told before"
        assert picture(again) == picture(core)


def test_an_event_that_fails_in_the_midst_of_the_core_leaves_no_trace_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weigh(policy: RoundRobin, *_: object) -> None:
        raise ZeroDivisionError("in the midst")

    with Journal(tmp_path / "j") as journal:
        write(journal, submitted("a"), Held("a"))
        sound, _ = taken(journal)
        write(journal, Weighted("a", 2.0))
        monkeypatch.setattr("gpuslice.sched_core.allocation.allocation.Allocation.reweigh", weigh)
        core, replay = taken(journal)
        assert replay.rejected[3].reason == "ZeroDivisionError: in the midst"
        assert picture(core) == picture(sound)
        assert core.jobs["a"].history == sound.jobs["a"].history
        assert core.jobs["a"].state is JobState.QUEUED


def test_what_was_set_aside_once_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer version may take it: but what came later was decided without it."""
    with Journal(tmp_path / "j") as journal:
        write(journal, submitted("a"))
        with monkeypatch.context() as patched:
            patched.setattr(Core, "_submit", lambda *_: 1 / 0)
            _, replay = taken(journal)
        write(journal, *(one.noted() for one in replay.rejected.values()))
        core, replay = taken(journal)
        assert (list(core.jobs), replay.rejected) == ([], {})


def test_a_long_history_is_told_in_parts_that_fit_into_an_answer(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        write(
            journal,
            *(
                msgspec.structs.replace(submitted("a"), spec=JobSpec(id="a", submit_s=0.0, model="m" * 60000))
                for _ in range(20)
            ),
        )
        after, seen = 0, 0
        while (part := history(journal, after)).after != after:
            after = part.after
            seen += len(part.events)
            assert len(msgspec.msgpack.encode(part)) < 1 << 20
        assert seen == 20


def test_a_core_is_made_again_what_its_journal_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal(tmp_path / "j") as journal:
        write(journal, submitted("a"), submitted("b"))
        core, replay = taken(journal)
        sound = picture(core)
        with monkeypatch.context() as patched:
            patched.setattr("gpuslice.sched_core.core.owner_requests._weigh", half_done)
            with pytest.raises(ZeroDivisionError):
                core.handle(Weighted("a", 2.0), 2.0)
        assert picture(core) != sound
        replay.repeat()
        core.check()
        assert picture(core) == sound
        assert core.handle(Weighted("a", 2.0), 2.0) is not None


def half_done(core: Core, job: Gang, *_: object) -> None:
    job.held = True
    raise ZeroDivisionError
