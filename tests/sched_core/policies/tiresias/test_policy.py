"""2D-LAS and 2D-Gittins on queues, by hand."""

from __future__ import annotations

import pytest

from gpuslice.errors import ConfigError
from gpuslice.sched_core.policies.registry import make_policy

#: Tiresias' worked example (section 3.2.4): two devices, (submit, devices, time).
EXAMPLE = [(0, 2, 2), (0, 1, 8), (0, 2, 6)]


@pytest.mark.parametrize(
    ("policy", "options", "finishes"),
    [
        ("srsf", {}, [2, 10, 16]),
        ("gittins", {"thresholds": (4.0,)}, [2, 12, 16]),
        ("las", {"quantum_s": 1.0}, [5, 14, 16]),
    ],
)
def test_worked_example(simulate, policy, options, finishes) -> None:
    outcome = simulate(EXAMPLE, "1x2", policy, **options)
    assert outcome.finish_s.tolist() == finishes
    averages = {"srsf": 9.33, "gittins": 10.0, "las": 11.67}
    assert outcome.finish_s.mean() == pytest.approx(averages[policy], abs=0.01)


def test_demoted_exactly_at_the_threshold(simulate) -> None:
    """Job 0 has 10 device-seconds after 5 s on two devices; job 1 then goes first."""
    outcome = simulate([(0, 2, 20), (1, 2, 3)], "1x2", "2das", thresholds=(10.0,))
    assert outcome.first_start_s.tolist() == [0, 5]
    assert outcome.finish_s.tolist() == [23, 8]
    assert outcome.preemptions.tolist() == [1, 0]


def test_two_thresholds_two_demotions(simulate) -> None:
    outcome = simulate([(0, 1, 20), (0, 1, 6)], "1x1", "2das", thresholds=(2.0, 5.0))
    # 0: [0,2) [4,7) then last queue; 1: [2,4) [7,10), demoted with 1 s left; first start decides.
    assert outcome.finish_s.tolist() == [25, 26]
    assert [(s.job, s.start_s, s.end_s) for s in outcome.spans] == [
        (0, 0, 2),
        (1, 2, 4),
        (0, 4, 7),
        (1, 7, 10),
        (0, 10, 25),
        (1, 25, 26),
    ]


def test_within_a_queue_first_start_decides(simulate) -> None:
    """Both in the first queue: the second to arrive waits, it does not share."""
    outcome = simulate([(0, 1, 5), (1, 1, 5)], "1x1", "2das", thresholds=(100.0,))
    assert outcome.finish_s.tolist() == [5, 10]
    assert outcome.preemptions.sum() == 0


def test_a_large_job_is_passed_over_and_overtakes_later(simulate) -> None:
    outcome = simulate([(0, 1, 10), (1, 2, 4), (2, 1, 10)], "1x2", "2das", thresholds=(3.0,))
    # 2 fits beside 0 and so starts before 1; once both are demoted, at 3 and 5, 1 takes both devices.
    assert outcome.first_start_s.tolist() == [0, 5, 2]
    assert outcome.service_s.tolist() == [10, 8, 10]


def test_promotion_restarts_the_counters(simulate) -> None:
    """Demoted after 2 s, waiting for 2 x 2 s: at 6 it enters the first queue anew."""
    rows = [(0, 1, 30), (2, 1, 2), (4, 1, 2), (6, 1, 2), (8, 1, 2)]
    never = simulate(rows, "1x1", "2das", thresholds=(2.0,))
    promoted = simulate(rows, "1x1", "2das", thresholds=(2.0,), promote=2.0)
    assert never.spans[0].end_s == promoted.spans[0].end_s == 2
    assert never.spans[-1].start_s == 10
    again = [span for span in promoted.spans if span.job == 0][1]
    assert (again.start_s, again.end_s) == (6, 8)  # demoted again after 2 s
    assert promoted.promotions[0] >= 1


def test_waits_add_up_so_that_short_runs_between_them_do_not_starve_a_job(simulate) -> None:
    """Job 0 runs for 10 s of every 100: no wait is twice as long as it ran, all together soon are."""
    rows = [(0, 1, 1000), *((100.0 * i, 1, 90) for i in range(1, 60))]
    options = {"thresholds": (100.0,), "promote": 2.0}
    last = simulate(rows, "1x1", "2das", **options, promote_waits="last")
    assert last.promotions == {}
    assert last.finish_s[0] > 6000
    every = simulate(rows, "1x1", "2das", **options)
    assert every.promotions[0] >= 1
    assert every.finish_s[0] < last.finish_s[0] - 900


def test_a_promotion_that_is_due_when_a_job_is_suspended_takes_place_soon_after(simulate) -> None:
    """The index suspends a job within the first queue: it waits there for longer than half of its time."""
    rows = [(4, 1, 1), (10, 2, 30), (12, 1, 29), (17, 2, 3), (19, 1, 18), (19, 1, 22)]
    outcome = simulate(rows, "1x2", "gittins", thresholds=(10.0,), promote=0.5)
    assert sum(outcome.promotions.values()) >= 1
    assert outcome.executed_s.tolist() == [duration_s for _, _, duration_s in rows]


def test_gittins_prefers_what_is_likely_to_end(simulate) -> None:
    """Services are 2 or 100: a job that got past 2 has 98 to go and gives way to a new one."""
    rows = [(0, 1, 100), (3, 1, 2), (4, 1, 2)]
    outcome = simulate(rows, "1x1", "gittins", thresholds=(50.0,))
    assert outcome.finish_s.tolist() == [104, 5, 7]


@pytest.mark.parametrize(
    ("past", "newcomer_first"),
    [
        ([20 / (1 - i / 200) - 20 for i in range(1, 200)], True),
        ([95 + i / 20 for i in range(200)], False),
    ],
    ids=["decreasing hazard rate: as LAS", "increasing hazard rate: as SRPT"],
)
def test_gittins_follows_the_hazard_rate(simulate, past, newcomer_first) -> None:
    """Job 0 has run for 40 s when job 1 comes. What is known is the distribution over the whole trace."""
    alone = [(10_000 * (i + 1), 1, duration_s) for i, duration_s in enumerate(past)]
    rows = [(0, 1, 95), (40, 1, 95), *alone]
    outcome = simulate(rows, "1x1", "gittins", thresholds=(1e6,))
    assert outcome.first_start_s[1] == (40 if newcomer_first else 95)


@pytest.mark.parametrize("options", [{"thresholds": (5.0, 3.0)}, {"thresholds": (0.0,)}, {"promote": 0.0}])
def test_impossible_options(options) -> None:
    with pytest.raises(ConfigError):
        make_policy("2das", options)


def test_options_from_text() -> None:
    policy = make_policy("2das", {"thresholds": "10,20", "promote": "inf", "by_devices": "false"})
    assert policy.name == "2das"
