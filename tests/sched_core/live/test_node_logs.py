"""Logs on other nodes belong to one journal: a new one begins new ones there, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.nodes.node_logs import identity, keep_only

from ...patience import PATIENCE_S
from .bench import alive
from .test_nodes import Site


class Renewed(Site):
    """A scheduler that can begin with a new journal and new logs."""

    def begin_agent(self) -> None:
        self.variables = (f"LOGS={identity(self.directory / 's' / 'logs')}",)
        super().begin_agent()

    def renew(self) -> None:
        """As ``down`` and ``up`` with other options while the node cannot be reached."""
        self.kill_agent()
        self.scheduler.local.end_all()
        self.scheduler.close()
        (self.directory / "s" / "logs").rename(self.directory / "past")
        self.lived.clear()
        self.open()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Renewed]:
    made = Renewed(tmp_path, lost_after_s=PATIENCE_S)
    yield made
    made.close()


def test_a_job_is_not_taken_for_one_of_an_earlier_journal(site: Renewed) -> None:
    site.begin_agent()
    site.on_b("a", site.directory / "enough")
    (site.directory / "enough").touch()
    assert site.finish("a") == [JobState.SUCCEEDED]
    site.renew()
    site.submit("here", site.directory / "never")
    job = site.submit("a")
    site.run(lambda: job.command.launched)
    site.begin_agent()
    assert site.finish("a") == [JobState.SUCCEEDED]
    assert job.nodes == (1,)
    assert job.steps, "it has run"
    assert site.output("a").count("begins") == 1


def test_what_runs_of_an_earlier_journal_is_killed_before_anything_is_started(site: Renewed) -> None:
    site.begin_agent()
    pid = site.on_b("a", site.directory / "never").ranks[0].pid
    site.renew()
    site.submit("here", site.directory / "never")
    job = site.submit("a")
    site.run(lambda: job.command.launched)
    assert alive(pid)
    site.begin_agent()
    site.run(lambda: job.state is JobState.RUNNING)
    assert not alive(pid)
    assert "clash" not in site.output("a")


def test_an_agent_that_is_started_again_goes_on(site: Renewed) -> None:
    site.begin_agent()
    site.on_b("a", site.directory / "enough")
    site.kill_agent()
    site.begin_agent()
    (site.directory / "enough").touch()
    assert site.finish("a") == [JobState.SUCCEEDED]


def test_former_logs_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "a.out"
    for content in ("one", "two", "three"):
        keep_only(tmp_path, content)
        keep_only(tmp_path, content)
        assert not log.exists()
        log.write_text(content)
    kept = [(tmp_path / past / log.name).read_text() for past in ("past-1", "past-2")]
    assert (kept, log.read_text()) == (["one", "two"], "three")


def test_logs_that_nobody_has_named_are_taken_for_those_that_are_meant(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "a.out"
    log.parent.mkdir()
    log.write_text("of an earlier version")
    keep_only(tmp_path, "one")
    assert log.exists()


def test_logs_keep_their_identity(tmp_path: Path) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    first.mkdir()
    other.mkdir()
    assert identity(first) == identity(first) != identity(other)
