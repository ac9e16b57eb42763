"""The jobs that words, ``--all`` and ``--mine`` stand for."""

from __future__ import annotations

import getpass

import pytest

from gpuslice.cli.job_choice import Choice, listed, matching, states
from gpuslice.errors import UsageError
from gpuslice.verbs import JobInfo

from ...cli.test_job_table import job

JOBS = [
    job("sweep-0", "running"),
    job("sweep-1", "queued", started=False),
    job("sweep-2", "succeeded"),
    job("own", tenant=getpass.getuser()),
    job("other", tenant="not " + getpass.getuser()),
]


def unfinished(job: JobInfo) -> bool:
    return not job.ended


@pytest.mark.parametrize(
    ("choice", "ids", "left"),
    [
        (Choice(["sweep-*"]), ["sweep-1", "sweep-0"], ["sweep-2"]),
        (Choice(["sweep-[01]", "own"]), ["sweep-1", "sweep-0", "own"], []),
        (Choice(["sweep-2", "own*"]), ["sweep-2", "own"], []),
        (Choice(every=True), ["sweep-1", "sweep-0", "own", "other"], []),
        (Choice(mine=True), ["sweep-1", "sweep-0", "own"], []),
        (Choice(["o*"], mine=True), ["own"], []),
    ],
)
def test_those_that_are_not_started_come_first_and_the_impossible_are_named(
    choice: Choice, ids: list[str], left: list[str]
) -> None:
    choice.check()
    assert not choice.exact
    assert choice.of(JOBS, unfinished) == (ids, left)


def test_ids_alone_need_no_look_at_the_jobs() -> None:
    assert Choice(["a", "b"]).exact


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (Choice(["no-*"]), "no job matches 'no-\\*'"),
        (Choice(["own*", "no"]), "there is no job 'no'"),
        (Choice(["other*"], mine=True), "no job matches 'other\\*'"),
        (Choice(["*-2"]), "not possible for any job that matches '\\*-2'"),
    ],
)
def test_what_matches_nothing_is_said(choice: Choice, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        choice.of(JOBS, unfinished)


@pytest.mark.parametrize(
    ("choice", "said"),
    [(Choice(), "no job is named"), (Choice(["a"], every=True), "both --all and 'a' are given")],
)
def test_a_choice_that_says_nothing_or_too_much_is_refused(choice: Choice, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        choice.check()


def test_words_match_whole_ids_in_the_order_of_submission() -> None:
    assert [one.id for one in matching(JOBS, ["own", "sweep-?"])] == ["sweep-0", "sweep-1", "sweep-2", "own"]


def test_states_are_known_words() -> None:
    assert states("running,queued") == ["running", "queued"]
    with pytest.raises(UsageError, match="'runing' is no state of a job") as error:
        states("runing")
    assert error.value.remedy == "did you mean 'running'?"


def test_only_the_first_of_many_are_listed() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed([str(n) for n in range(12)]) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"
