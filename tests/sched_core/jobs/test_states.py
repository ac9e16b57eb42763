"""The table of states."""

from __future__ import annotations

from gpuslice.sched_core.jobs.states import ENDED, LIVE, TRANSITIONS, JobState, Trigger


def test_the_table_leads_out_of_every_live_state_and_out_of_no_other() -> None:
    sources = {state for state, _ in TRANSITIONS}
    assert sources == {*LIVE, JobState.FAILED}, "what failed may be tried again"
    for state in LIVE:
        assert {TRANSITIONS[state, t] for t in (Trigger.SUCCEED, Trigger.FAIL, Trigger.CANCEL)} == ENDED
