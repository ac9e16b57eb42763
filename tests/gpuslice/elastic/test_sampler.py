"""Every sample exactly once an epoch, whatever the number of ranks, and in the same micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.elastic.sampler import ElasticSampler, MicroBatch, Scaling
from gpuslice.errors import RefusedSnapshotError, UsageError

SIZES = st.integers(1, 20).flatmap(lambda batch: st.tuples(st.just(batch), st.integers(1, batch)))
WIDTHS = st.lists(st.integers(1, 5), min_size=1, max_size=40)


def train(sampler: ElasticSampler, widths: Sequence[int]) -> list[list[MicroBatch]]:
    """The micro-batches of each global batch of one epoch, the width changing after each of them."""
    done: list[list[MicroBatch]] = []
    while sampler.more(width := widths[len(done) % len(widths)]):
        shares = [next(sampler.rest(rank, width)) for rank in range(width)]
        assert len({share.samples for share in shares}) == 1
        done.append([part for share in shares for part in share.micro_batches])
        sampler.advance(shares[0])
    return done


@given(length=st.integers(0, 120), sizes=SIZES, widths=WIDTHS, shuffle=st.booleans())
def test_every_sample_is_seen_once_an_epoch(
    length: int, sizes: tuple[int, int], widths: list[int], shuffle: bool
) -> None:
    resized, fixed = (ElasticSampler(range(length), *sizes, shuffle=shuffle, seed=7) for _ in range(2))
    for _ in range(2):
        done = train(resized, widths)
        # Not only the same samples: the same micro-batches with the same seeds, in each global batch.
        assert done == train(fixed, [1])
        seen = [index for parts in done for part in parts for index in part.indices]
        assert sorted(seen) == list(range(length))
        assert all(len(part.indices) <= sizes[1] for parts in done for part in parts)
        for sampler in (resized, fixed):
            sampler.next_epoch()


@given(length=st.integers(0, 120), sizes=SIZES, widths=WIDTHS)
def test_every_sample_is_seen_once_when_the_batch_grows(
    length: int, sizes: tuple[int, int], widths: list[int]
) -> None:
    sampler = ElasticSampler(range(length), *sizes, scaling="learning_rate")
    done = train(sampler, widths)
    seen = [index for parts in done for part in parts for index in part.indices]
    assert sorted(seen) == list(range(length))
    full = [sizes[0] * widths[number % len(widths)] for number in range(len(done))]
    assert [sum(len(part.indices) for part in parts) for parts in done[:-1]] == full[:-1]


@given(length=st.integers(1, 120), sizes=SIZES, width=st.integers(1, 5))
def test_a_rest_that_fills_no_batch_can_be_dropped(length: int, sizes: tuple[int, int], width: int) -> None:
    sampler = ElasticSampler(range(length), *sizes, drop_last=True)
    done = train(sampler, [width])
    assert [sum(len(part.indices) for part in parts) for parts in done] == [sizes[0]] * (length // sizes[0])


@pytest.mark.parametrize("scaling", ["accumulation", "learning_rate"])
def test_what_was_dropped_is_not_counted(scaling: Scaling) -> None:
    sampler = ElasticSampler(range(30), 4, 2, drop_last=True, scaling=scaling)
    done = [train(sampler, [1])]
    sampler.next_epoch()
    done.append(train(sampler, [3]))
    trained = sum(len(part.indices) for batches in done for parts in batches for part in parts)
    assert sampler.samples == trained < 60
    heir = ElasticSampler(range(30), 4, 2, drop_last=True, scaling=scaling)
    heir.load_state_dict(sampler.state_dict())
    assert heir.samples == trained
    before = {name: value for name, value in sampler.state_dict().items() if name != "earlier"}
    heir.load_state_dict(before)
    assert heir.samples == 30 + sampler.position


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first, same, other = (ElasticSampler(range(50), 50, 50, seed=seed) for seed in (0, 0, 1))
    orders = [train(sampler, [1]) for sampler in (first, same, other)]
    first.next_epoch()
    orders.append(train(first, [1]))
    indices = [order[0][0].indices for order in orders]
    assert indices[0] == indices[1]
    assert len({indices[0], indices[2], indices[3]}) == 3


def test_a_state_is_gone_on_from() -> None:
    sampler = ElasticSampler(range(30), 4, 2)
    sampler.next_epoch()
    sampler.advance(next(sampler.rest(0, 3)))
    heir = ElasticSampler(range(30), 4, 2)
    heir.load_state_dict(sampler.state_dict())
    assert (heir.epoch, heir.position) == (1, 4)
    assert list(heir.rest(1, 2)) == list(sampler.rest(1, 2))


@pytest.mark.parametrize("other", [(31, 4, 2), (30, 5, 2), (30, 4, 1)])
def test_a_state_of_other_batches_is_refused(other: tuple[int, int, int]) -> None:
    length, *sizes = other
    with pytest.raises(RefusedSnapshotError, match="the sampler's"):
        ElasticSampler(range(length), *sizes).load_state_dict(ElasticSampler(range(30), 4, 2).state_dict())


def test_impossible_batches_are_refused() -> None:
    with pytest.raises(UsageError, match="micro-batches of 5"):
        ElasticSampler(range(3), 4, 5)
    with pytest.raises(UsageError, match="there is no scaling 'lr'"):
        ElasticSampler(range(3), 4, 2, scaling="lr")  # type: ignore[arg-type]
