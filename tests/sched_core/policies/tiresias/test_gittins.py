"""The index against its definition and against theory."""

from __future__ import annotations

from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.sched_core.policies.tiresias.gittins import GittinsIndex, PublishedIndex, yarn_services

SERVICES = st.lists(st.integers(1, 50), min_size=1, max_size=12)


def by_definition(services: list[int], attained: float, more: float) -> float:
    longer = [service - attained for service in services if service > attained]
    if not longer or more <= 0:
        return 0.0
    chance = sum(left <= more for left in longer) / len(longer)
    return chance / (sum(min(left, more) for left in longer) / len(longer))


@given(SERVICES, st.integers(0, 50), st.integers(1, 60))
def test_within_is_the_definition(services: list[int], attained: int, more: int) -> None:
    index = GittinsIndex(services)
    assert index.within(attained, more) == pytest.approx(by_definition(services, attained, more))


@given(SERVICES, st.integers(0, 50))
def test_best_is_the_supremum(services: list[int], attained: int) -> None:
    index = GittinsIndex(services)
    tried = max(by_definition(services, attained, more) for more in range(1, 61))
    assert index.best(attained) == pytest.approx(tried)


def test_decreasing_hazard_rates_rank_like_las() -> None:
    """Heavy tail (Lomax, exponent 1): whoever attained less has the larger index."""
    services = [1 / (1 - (i + 0.5) / 2000) - 1 for i in range(2000)]
    index = GittinsIndex(services)
    values = [index.within(attained, 1.0) for attained in (0.0, 0.5, 2.0, 5.0, 20.0)]
    assert values == sorted(values, reverse=True)


def test_increasing_hazard_rates_rank_like_srpt() -> None:
    """All jobs about equally long: whoever attained more is closer to the end and has the larger index."""
    index = GittinsIndex([95 + i / 10 for i in range(100)])
    values = [index.best(attained) for attained in (0.0, 30.0, 60.0, 90.0)]
    assert values == sorted(values)


def test_constant_hazard_rates_do_not_rank() -> None:
    """Exponential service forgets: the index stays 1 / mean."""
    jobs = 20_000
    index = GittinsIndex([-100 * log(1 - (i + 0.5) / jobs) for i in range(jobs)])
    for attained in (0.0, 50.0, 100.0):
        assert index.within(attained, 20.0) == pytest.approx(0.01, rel=0.01)


def test_the_published_mistake() -> None:
    """With S for S - a in the expectation, the published index is right at a = 0 only."""
    services = yarn_services()
    published, index = PublishedIndex(services), GittinsIndex(services)
    assert published.at(0) == pytest.approx(1e6 * index.within(0, 3250), rel=0.01)
    assert published.at(3250) == pytest.approx(87.4, abs=0.1)
    assert 1e6 * index.within(3250, 3250) == pytest.approx(122.2, abs=0.1)
    assert published.at(10**9) == 0.0


def test_published_rounding_is_that_of_python_2() -> None:
    """One of 64 jobs ends within the next second: 0.015625 becomes 0.01563, not 0.01562."""
    index = PublishedIndex(range(1, 65), more=1)
    assert index.at(0) == 15_630.0
