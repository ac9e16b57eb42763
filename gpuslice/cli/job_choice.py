"""Which jobs a command is for: ids, quoted globs such as ``'sweep-*'``, ``--all`` and ``--mine``."""

from __future__ import annotations

import getpass
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from gpuslice.errors import UsageError
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.options import nearest
from gpuslice.verbs import JobInfo

#: Stands for jobs without a tenant in ``--user``, as in the table.
NOBODY = "-"
#: So many jobs are named in one line, at most.
_NAMED = 10


class Choice(NamedTuple):
    """Jobs as a user names them.

    Attributes
    ----------
    words
        Ids and globs.
    every, mine
        True for all jobs without naming them, and for the user's own jobs alone.
    """

    words: Sequence[str] = ()
    every: bool = False
    mine: bool = False

    def check(self) -> None:
        """Raise ``UsageError`` if the choice names no job, or contradicts itself."""
        if self.words and self.every:
            raise UsageError(f"both --all and {self.words[0]!r} are given", "leave one of them out")
        if not (self.words or self.every or self.mine):
            raise UsageError("no job is named", "name jobs or a quoted glob, or give --all or --mine")

    @property
    def exact(self) -> bool:
        """True if the choice is nothing but ids."""
        return not (self.every or self.mine or any(map(is_glob, self.words)))

    def of(self, jobs: Sequence[JobInfo], possible: Callable[[JobInfo], bool]) -> tuple[list[str], list[str]]:
        """Return the ids of the chosen jobs, and of those that a glob matches but that are not ``possible``.

        A job that is named by its id is chosen in any case. Jobs that have no processes come first, or each
        would be started in the place of the one before.

        Raises
        ------
        UsageError
            If a word matches no job, or nothing is possible.
        """
        own = [job for job in jobs if not self.mine or is_own(job)]
        matched = matching(own, self.words) if self.words else own
        named = {word for word in self.words if not is_glob(word)}
        chosen = [job for job in matched if job.id in named or possible(job)]
        left = [job.id for job in matched if job not in chosen] if self.words else []
        if not chosen:
            raise UsageError(f"this is not possible for {self._said()}", "`gpuslice ps` shows how they stand")
        return [job.id for job in sorted(chosen, key=lambda job: job.started)], left

    def _said(self) -> str:
        whose = " of yours" if self.mine else ""
        matching = f" that matches {' or '.join(map(repr, self.words))}" if self.words else ""
        return f"any job{whose}{matching}"


def is_glob(word: str) -> bool:
    """Return True if ``word`` is no id but a pattern: no id has such characters."""
    return any(character in word for character in "*?[")


def is_own(job: JobInfo) -> bool:
    """Return True if ``job`` is the user's: its tenant has the user's name, or it has none."""
    return job.tenant in ("", getpass.getuser())


def matching(jobs: Sequence[JobInfo], words: Sequence[str]) -> list[JobInfo]:
    """Return the jobs that any of ``words``, ids and globs, matches. They stay in order.

    Raises
    ------
    UsageError
        If one of ``words`` matches no job.
    """
    for word in words:
        if not any(fnmatchcase(job.id, word) for job in jobs):
            what = f"no job matches {word!r}" if is_glob(word) else f"there is no job {word!r}"
            raise UsageError(what, "`gpuslice ps` lists them")
    return [job for job in jobs if any(fnmatchcase(job.id, word) for word in words)]


def states(text: str) -> list[str]:
    """Return the states in ``text``, which are separated by commas. Raise ``UsageError`` for another word."""
    known = [state.value for state in JobState]
    for word in (words := text.split(",")):
        if word not in known:
            raise UsageError(f"{word!r} is no state of a job", nearest(word, known))
    return words


def listed(names: Sequence[str]) -> str:
    """Return ``names`` in words, the first of them if there are many."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
