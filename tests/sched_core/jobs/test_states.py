"""The table of states."""

from __future__ import annotations

from gpuslice.sched_core.jobs.states import ENDED, LIVE, TRANSITIONS, JobState, Trigger


def test_the_table_leads_out_of_every_live_state_and_from_the_end_only_to_another_attempt() -> None:
    assert {state for state, _ in TRANSITIONS} == set(JobState)
    for state in ENDED:
        assert {t: to for (at, t), to in TRANSITIONS.items() if at is state} == {
            Trigger.RETRY: JobState.QUEUED
        }
    for state in LIVE:
        assert {TRANSITIONS[state, t] for t in (Trigger.SUCCEED, Trigger.FAIL, Trigger.CANCEL)} == ENDED
