"""The incremental greedy choice against the walk it stands for."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.sched_core.job import Job, JobSpec
from gpuslice.sched_core.policies.ranking import Entry, Ranking

CAPACITY = 8
#: Add a job of a size with a priority, remove one, or give one another priority.
STEP = st.one_of(
    st.tuples(st.just("add"), st.integers(1, CAPACITY), st.integers(0, 5)),
    st.tuples(st.just("remove"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("rekey"), st.integers(0, 30), st.integers(0, 5)),
)


def walk(entries: list[Entry], *, strict: bool, blocked: set[tuple[int, str]]) -> set[int]:
    left, chosen = CAPACITY, set()
    for entry in sorted(entries, key=lambda entry: entry.key):
        if entry.size <= left and (entry.running or entry.size_class not in blocked):
            left -= entry.size
            chosen.add(entry.job.number)
        elif strict:
            break
    return chosen


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(STEP, st.booleans()), max_size=40))
def test_repair_equals_the_walk(steps: list[tuple[tuple[str, int, int], bool]]) -> None:
    ranking: Ranking[Entry] = Ranking(CAPACITY)
    entries: list[Entry] = []
    for number, ((verb, first, second), repair) in enumerate(steps):
        if verb == "add":
            entry = Entry(Job(JobSpec(id=str(number), submit_s=0.0, devices=first), number), "")
            entries.append(entry)
            ranking.add(entry, (second, number))
        elif entries and verb == "remove":
            ranking.remove(entries.pop(first % len(entries)))
        elif entries:
            entry = entries[first % len(entries)]
            ranking.rekey(entry, (second, entry.job.number))
        if repair:
            before = {entry.job.number for entry in entries if entry.running}
            flipped = {entry.job.number for entry in ranking.repair()}
            after = {entry.job.number for entry in entries if entry.running}
            assert after == walk(entries, strict=False, blocked=set())
            assert flipped == before ^ after
            assert ranking.free == CAPACITY - sum(entry.size for entry in entries if entry.running)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=12), st.integers(0, 3))
def test_strict_stops_at_the_first_that_does_not_fit(sizes: list[int], finished: int) -> None:
    ranking: Ranking[Entry] = Ranking(CAPACITY, strict=True)
    entries = [Entry(Job(JobSpec(id=str(i), submit_s=0.0, devices=n), i), "") for i, n in enumerate(sizes)]
    for entry in entries:
        ranking.add(entry, (entry.job.number,))
    ranking.repair()
    for entry in entries[:finished]:
        ranking.remove(entry)
    ranking.repair()
    left = entries[finished:]
    assert {entry.job.number for entry in left if entry.running} == walk(left, strict=True, blocked=set())


def test_blocked_classes_are_passed_over() -> None:
    ranking: Ranking[Entry] = Ranking(CAPACITY)
    large, small = (Entry(Job(JobSpec(id=str(n), submit_s=0.0, devices=n), n), "") for n in (8, 2))
    ranking.add(large, (0,))
    ranking.add(small, (1,))
    assert ranking.repair({large.size_class}) == [small]
    assert ranking.repair() == [large, small]
    assert large.running
    assert not small.running


def test_classes_of_which_nobody_waits_are_looked_at_no_more() -> None:
    ranking: Ranking[Entry] = Ranking(CAPACITY)
    entries = [Entry(Job(JobSpec(id=str(n), submit_s=0.0), n), kind=f"of its own: {n}") for n in range(30)]
    for entry in entries:
        ranking.add(entry, (entry.job.number,))
    ranking.repair()
    assert set(ranking._waiting) == {entry.size_class for entry in entries if not entry.running}
    for entry in entries:
        ranking.remove(entry)
    ranking.repair()
    assert not ranking._waiting


def test_keys_of_running_jobs_may_all_change() -> None:
    ranking: Ranking[Entry] = Ranking(CAPACITY)
    entries = [Entry(Job(JobSpec(id=str(n), submit_s=0.0, devices=4), n), "") for n in range(3)]
    for entry in entries:
        ranking.add(entry, (entry.job.number,))
    ranking.repair()
    ranking.rekey_running(lambda place, entry: (10 - place,))
    assert [entry.job.number for _, entry in ranking.running] == [1, 0]
    assert ranking.repair() == [entries[2], entries[0]]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, CAPACITY), st.integers(0, 5)), min_size=1, max_size=12),
    st.lists(st.integers(0, 5), min_size=12, max_size=12),
    st.sampled_from([None, (3,)]),
)
def test_keys_worked_out_when_needed_decide_like_keys_worked_out_at_once(
    jobs: list[tuple[int, int]], later: list[int], before: tuple[int] | None
) -> None:
    """Running jobs get new keys, then another one arrives."""
    results = []
    for at_once in (False, True):
        ranking: Ranking[Entry] = Ranking(CAPACITY)
        entries = [
            Entry(Job(JobSpec(id=str(n), submit_s=0.0, devices=size), n), "")
            for n, (size, _) in enumerate(jobs)
        ]
        for entry, (_, key) in zip(entries[:-1], jobs, strict=False):
            ranking.add(entry, (key, entry.job.number))
        ranking.repair()
        fresh = {entry: (later[entry.job.number], entry.job.number) for entry in entries}
        if before is not None:  # Those below keep below, those beyond keep their keys.
            fresh = {
                e: (min(key[0], 2), key[1]) if e.key and e.key < before else e.key for e, key in fresh.items()
            }
        if at_once:
            ranking.rekey_running(lambda _, entry, fresh=fresh: fresh[entry])
        else:
            ranking.expire(lambda entry, fresh=fresh: fresh[entry], before)
        ranking.add(entries[-1], (jobs[-1][1], len(jobs) - 1))
        flipped = [entry.job.number for entry in ranking.repair()]
        behind = [entry.job.number for entry in ranking.behind(entries[-1])] if entries[-1].running else []
        results.append((flipped, behind, [entry.running for entry in entries]))
    assert results[0] == results[1]
