"""Events for people: local time and units."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from gpuslice.cli.event_line import line, narrow
from gpuslice.cli.text_width import width
from gpuslice.verbs import EventInfo


@pytest.fixture
def in_india(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def shown(what: str, details: dict[str, int | float | str | bool | None], unix_s: float | None) -> str:
    return line(EventInfo(number=1, at_s=12.5, what=what, job="j", rank=0, details=details, unix_s=unix_s))


@pytest.mark.usefixtures("in_india")
def test_a_time_is_local() -> None:
    assert shown("bye", {}, 1.25) == "1970-01-01 05:30:01.250\tj:0\tbye\t"


def test_without_one_it_is_the_schedulers() -> None:
    assert shown("bye", {}, None).startswith("12.500 s\tj:0\t")


def test_values_have_units() -> None:
    told = {
        "copy_out_s": 0.5,
        "bytes": 3 << 20,
        "skew": 0.123456,
        "route": "vmm",
        "migrated": True,
        "x": None,
    }
    assert shown("switched", told, None).endswith(
        "copy_out=0.500s bytes=3.00MiB skew=0.1235 route=vmm migrated=True"
    )


def test_on_a_terminal_a_line_is_cut_and_moves_no_cursor() -> None:
    details: dict[str, int | float | str | bool | None] = {"reason": "one\ntwo \x1b[31m" * 40}
    event = EventInfo(number=1, at_s=12.5, what="failed", job="j", rank=0, details=details, unix_s=1.25)
    found = narrow(event, 100)
    assert width(found) <= 100
    assert found.isprintable()
    assert found.endswith("…")


def test_why_a_job_waits_is_a_sentence() -> None:
    assert shown("waits", {"why": "waits for 1 device; cuda:0 is used by a"}, 1.25).endswith(
        "\twaits\twaits for 1 device; cuda:0 is used by a"
    )
