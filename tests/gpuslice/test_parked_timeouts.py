"""A gang that is parked for longer than its process group's timeout goes on."""

from __future__ import annotations

from pathlib import Path

from .conftest import Workshop

SCRIPT = Path(__file__).with_name("parked_timeouts.py")


def test_a_gang_parked_for_longer_than_its_timeout_goes_on(warm_workshop: Workshop) -> None:
    done = warm_workshop.python(str(SCRIPT), str(warm_workshop.directory), "gloo")
    assert done.returncode == 0, done.stderr
