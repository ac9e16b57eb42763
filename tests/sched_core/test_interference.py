"""Estimates of slow-downs, on samples whose truth is known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import log

import pytest

from gpuslice.sched_core.interference import (
    LEAST,
    LEAST_WITH_PRIOR,
    MOST,
    Prior,
    Sample,
    Verdict,
    judge,
    judge_exact,
    slowdown,
)

RUNS = 100
SECONDS = 2.0


def samples(source: random.Random, rate: float, count: int, noise: float = 0.05) -> list[Sample]:
    """Whole steps of slices in which a job makes ``rate`` steps a second, more or less."""
    return [
        Sample(max(1, int(rate * SECONDS * source.lognormvariate(0.0, noise) + source.random())), SECONDS)
        for _ in range(count)
    ]


@pytest.mark.parametrize(("rate", "truth"), [(50.0, 2.0), (50.0, 1.05), (4.0, 1.6), (1000.0, 3.7)])
@pytest.mark.parametrize("count", [LEAST, 8])
def test_the_interval_holds_the_truth_in_at_least_95_of_100_runs(
    rate: float, truth: float, count: int
) -> None:
    source = random.Random(7)
    held = 0
    for _ in range(RUNS):
        found = slowdown(samples(source, rate, count), samples(source, rate / truth, count))
        assert found is not None
        held += found.low <= truth <= found.high
    assert held >= 95


def pair(
    source: random.Random, count: int, slower: Sequence[float]
) -> list[tuple[list[Sample], list[Sample]]]:
    return [(samples(source, 40.0, count), samples(source, 40.0 / factor, count)) for factor in slower]


@pytest.mark.parametrize(
    ("slower", "count", "verdict"),
    [((2.0, 2.0), 11, Verdict.SLICE), ((1.05, 1.1), 5, Verdict.PACK), ((1.1, 5.0), 5, None)],
)
def test_a_set_is_judged_by_what_it_makes_together(
    slower: tuple[float, float], count: int, verdict: Verdict | None
) -> None:
    source = random.Random(3)
    found = [judge(pair(source, count, slower)) for _ in range(20)]
    assert {one.verdict for one in found if one is not None} == {verdict}
    truth = sum(1 / factor for factor in slower)
    assert all(one is not None and one.total.low <= truth <= one.total.high for one in found)


def test_nothing_is_said_of_too_few_samples() -> None:
    source = random.Random(3)
    assert judge(pair(source, LEAST - 1, (2.0, 2.0))) is None
    assert slowdown(samples(source, 40.0, LEAST), samples(source, 40.0, LEAST - 1)) is None


def test_the_means_decide_if_the_intervals_never_do() -> None:
    source = random.Random(5)
    noisy = [(samples(source, 40.0, MOST, 0.9), samples(source, 40.0 / 1.7, MOST, 0.9)) for _ in range(2)]
    found = judge(noisy)
    assert found is not None
    assert found.total.low < 1.1 < found.total.high
    assert found.verdict is (Verdict.PACK if found.total.mean > 1.1 else Verdict.SLICE)


def test_what_is_packed_stays_so_until_it_is_worse_than_slicing_for_certain() -> None:
    source = random.Random(5)
    doubtful, worse = pair(source, 6, (1.95, 1.95)), pair(source, 6, (2.5, 2.5))
    kept, given_up = judge(doubtful, packed=True), judge(worse, packed=True)
    assert kept is not None
    assert given_up is not None
    assert (kept.verdict, given_up.verdict) == (None, Verdict.SLICE)


def test_samples_that_are_all_alike_are_no_sharper_than_a_step() -> None:
    alike = [Sample(5, 1.0)] * LEAST
    found = slowdown(alike, alike)
    assert found is not None
    assert found.low < 0.9 < 1.1 < found.high


def test_with_a_prior_fewer_samples_decide() -> None:
    source = random.Random(3)
    few = pair(source, LEAST_WITH_PRIOR, (1.1, 1.1))
    assert judge(few) is None
    found = judge(few, priors=[Prior(log(1 / 1.1), 0.1)] * 2)
    assert found is not None
    assert found.verdict is Verdict.PACK
    assert judge(few, priors=[Prior(log(1 / 1.1), 0.1), None]) is None, "one of them is not known"


@pytest.mark.parametrize("error", [0.1, 0.3])
def test_the_interval_holds_the_truth_with_a_prior_that_is_off_by_its_error(error: float) -> None:
    source = random.Random(5)
    held = 0
    for _ in range(RUNS):
        prior = Prior(source.gauss(log(1 / 1.6), error), error)
        alone, together = samples(source, 40.0, 4), samples(source, 25.0, 4)
        found = slowdown(alone, together, prior)
        assert found is not None
        held += found.low <= 1.6 <= found.high
    assert held >= 95


def test_samples_that_contradict_a_prior_count_alone() -> None:
    source = random.Random(3)
    wrong = [Prior(log(0.99), 0.01)] * 2
    many, few = pair(source, 8, (3.0, 3.0)), pair(source, LEAST_WITH_PRIOR, (3.0, 3.0))
    assert judge(many, priors=wrong) == judge(many)
    assert judge(few, priors=wrong) is None, "then as many are needed as without"


@pytest.mark.parametrize(
    ("normalized", "verdict"),
    [((0.9, 0.9), Verdict.PACK), ((0.5, 0.5), Verdict.SLICE), ((0.9, 0.0), Verdict.SLICE)],
)
def test_known_rates_are_judged_as_measured_ones_without_an_error(
    normalized: tuple[float, float], verdict: Verdict
) -> None:
    found = judge_exact(normalized, worth=1.1)
    assert found.verdict is verdict
    assert set(found.total) == {sum(normalized)}
    exact = [
        ([Sample(10**9, 1.0)] * LEAST, [Sample(max(1, int(one * 10**9)), 1.0)] * LEAST) for one in normalized
    ]
    measured = judge(exact, worth=1.1)
    assert measured is not None
    assert measured.verdict is verdict
