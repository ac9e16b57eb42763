"""The table of ``ps``: no line is longer than the screen, whatever the jobs are; ``show`` says all."""

from __future__ import annotations

import io
import os
import sys

import msgspec
import pytest

from gpuslice.cli import job_details, job_table, tables
from gpuslice.cli.text_width import cut, cut_inside, one_line, padded, width
from gpuslice.verbs import ArrayInfo, AttemptInfo, EndInfo, JobInfo, StartInfo

_REASON = "waits for 8 devices; cuda:0, cuda:1, cuda:2 and 5 more are used by a, b, c and 12 more"
_GREEK = "η εκπαίδευση περιμένει τις συσκευές της μέχρι το επόμενο όριο των γειτόνων της"
_JAPANESE = "学習は次の境界まで装置を待っています、他の仕事が使っているからです、少々お待ちください"


def job(name: str = "a", state: str = "running", **values: object) -> JobInfo:
    """A job of which ``values`` are told, and else nothing."""
    needed = (field.name for field in msgspec.structs.fields(JobInfo) if field.required)
    empty: dict[str, object] = dict.fromkeys(needed)
    numbers = ("demand", "steps", "slices", "suspends", "migrations", "switches", "missed_boundaries")
    empty |= dict.fromkeys((*numbers, "restarts", "max_restarts"), 0)
    seconds = ("executed_s", "service_s", "setup_s", "age_s", "waited_s", "fair_share_delay_s", "blackout_s")
    empty |= dict.fromkeys((*seconds, "fragmentation_delay_s", "held_s", "switching_s"), 0.0)
    empty |= dict.fromkeys(("devices", "moving_to", "recent", "command", "shares_with"), ())
    known = {"id": name, "state": state, "tenant": "", "reason": "", "held": False, "weight": 1.0}
    return msgspec.convert({**empty, **known, "started": True, **values}, JobInfo)


LONG = "n" * 60
EXTREME = [
    job("a"),
    job(LONG, "suspended", tenant="t" * 64, why=_REASON, steps=123_456_789, executed_s=36_000.0),
    job(
        f"x{LONG}",
        "relaunching",
        tenant="学習" * 20,
        devices=tuple(f"node-{n}/cuda:{n % 3}" for n in range(8)),
        total_steps=2**53,
        steps=2**52,
        executed_s=1e9,
        why=_JAPANESE * 3,
    ),
    job("e", "queued", tenant="lab", why=_GREEK * 2),
    job("n", "failed", exit_code=-9, failure="infrastructure", reason="one\ttwo\nthree \x1b[31m" * 9),
    job("d", devices=tuple(f"cuda:{n}" for n in range(8)), total_steps=10_000, steps=4_200, executed_s=5e5),
]


@pytest.mark.parametrize("columns", [100, 90, 80, 72, 60, 50, 40])
def test_no_line_is_longer_than_the_screen(columns: int) -> None:
    for jobs in (*([one] for one in EXTREME), EXTREME, []):
        for line in job_table.lines(jobs, columns):
            assert width("  ".join(line).rstrip()) <= columns, line
            assert "".join(line).isprintable()


def test_a_reason_has_room_beside_a_long_name_and_is_cut_with_an_ellipsis() -> None:
    header, line = ("  ".join(cells).rstrip() for cells in job_table.lines([EXTREME[1]]))
    assert header.split() == ["JOB", "USER", "STATE", "DEVICE", "PROGRESS", "TIME", "WHY"]
    why = line[header.index("WHY") :]
    assert why.endswith("…")
    assert len(why) >= 32
    assert _REASON.startswith(why[:-1])
    assert line.startswith("nnnnnnn…nnnnnn  ttt…tt  ")


def test_what_fits_is_not_cut_and_has_its_unit() -> None:
    (_, first, second) = ["  ".join(line).split("  ") for line in job_table.lines([EXTREME[5], EXTREME[0]])]
    cells = [cell.strip() for cell in first if cell.strip()]
    assert cells == ["d", "-", "running", "cuda:0-7", "42 % of 10000", "5.8 d"]
    assert [cell.strip() for cell in second if cell.strip()] == ["a", "-", "running", "-", "-", "0.0 s"]


def test_live_jobs_come_first_and_ended_ones_say_how_they_ended() -> None:
    jobs = [
        job("old", "failed", exit_code=7, failure="user", reason="ValueError: no"),
        job("new", "queued", why="its process is starting (3.0 s so far)"),
        job("done", "succeeded", exit_code=0),
        job("gone", "cancelled", reason="by its owner"),
        job("going", "cancelled", reason="by its owner", why="its processes are ending (1.0 s so far)"),
    ]
    lines = ["  ".join(line).rstrip() for line in job_table.lines(jobs)[1:]]
    assert [line.split()[0] for line in lines] == ["new", "old", "done", "gone", "going"]
    assert [line[lines[0].index("its process") :] for line in lines] == [
        "its process is starting (3.0 s so far)",
        "exit 7, user: ValueError: no",
        "",
        "by its owner",
        "its processes are ending (1.0 s so far)",
    ]


def test_devices_in_a_row_are_one_word() -> None:
    for devices, word in (
        (("cuda:0", "cuda:1", "cuda:3"), "cuda:0-1,cuda:3"),
        (("cuda:1", "cuda:0"), "cuda:1,cuda:0"),
        (("cuda:0", "b/cuda:1", "b/cuda:2"), "cuda:0,b/cuda:1-2"),
        (("cpu",), "cpu"),
    ):
        assert job_table.lines([job(devices=devices)])[1][3].strip() == word


def test_an_array_is_one_line_in_its_place_with_counts() -> None:
    array = ArrayInfo("s", "t", ("cuda:0", "cuda:1"), 60.0, {"queued": 5, "failed": 1, "running": 2}, 1)
    over = ArrayInfo("o", "", (), 0.0, {"cancelled": 1, "succeeded": 2}, 1)
    lines = job_table.lines([job("a"), array, over, job("b")])
    assert [line[0].strip() for line in lines] == ["JOB", "a", "s", "b", "o"]
    assert [cell.strip() for cell in lines[2]] == [
        *("s", "t", "running", "cuda:0-1", "1 of 8 ended", "60.0 s"),
        "2 running, 5 queued, 1 failed",
    ]
    ended = [cell.strip() for cell in lines[4]][2:]
    assert ended == ["cancelled", "-", "3 of 3 ended", "0.0 s", "1 cancelled, 2 succeeded"]


def test_on_a_narrow_terminal_it_leaves_columns_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((60, 24)))
    job_table.show([EXTREME[1]])
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["JOB", "STATE", "DEVICE", "WHY"]
    assert max(width(header), width(line)) <= 60
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((300, 24)))
    job_table.show(EXTREME)
    assert max(map(width, capsys.readouterr().out.splitlines())) == 100


def test_wide_cuts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show(tables.jobs(EXTREME))
    out = capsys.readouterr().out
    for found in EXTREME:
        assert found.id in out
        assert one_line(found.why or found.reason) in out
    assert {len(line.split("\t")) for line in out.splitlines()} == {18}


def test_show_says_everything_and_nothing_that_does_not_apply() -> None:
    said = dict(line.split("  ", 1) for line in job_details.text(EXTREME[1]).splitlines())
    labels = {label.strip(): value.strip() for label, value in said.items()}
    assert labels["why"] == _REASON
    assert labels["user"] == "t" * 64
    assert labels["time"] == "trained 10.0 h; 0.0 s since its submission"
    assert {"deadline", "trial", "exit", "reason", "memory"}.isdisjoint(labels)


def test_show_has_attempts_and_last_lines() -> None:
    attempts = (
        AttemptInfo(1, 10.0, 70.0, 1, "user: ValueError"),
        AttemptInfo(2, 80.0, None, None, None),
    )
    page = job_details.text(
        job("a", attempts=attempts, after=("b", "c:any"), directory="/d"),
        100.0,
        {"stdout": b"one\x1b[31m\ntwo\n", "stderr": b""},
    )
    lines = page.splitlines()
    assert "attempt 1  began 90.0 s ago, took 60.0 s, exit code 1: user: ValueError" in lines
    assert "attempt 2  began 20.0 s ago" in lines
    assert lines[-4:] == ["", "its last lines on stdout:", "  one [31m", "  two"]
    assert "after      b, c:any" in lines
    assert "directory  /d" in lines


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        (EndInfo("on_end", "waits", 0, "", None), "on end    when it has ended"),
        (EndInfo("on_end", "owed", 0, "", None), "on end    under way"),
        (EndInfo("on_end", "done", 1, "", None), "on end    done"),
        (EndInfo("notify", "done", 2, "", None), "notify    done after 2 tries"),
        (
            EndInfo("notify", "owed", 2, "HTTP status 500", 8.0),
            "notify    failed after 2 tries, tried again in 8.0 s: HTTP status 500",
        ),
        (
            EndInfo("on_end", "given up", 5, "exit code 1", None),
            "on end    given up after 5 tries: exit code 1",
        ),
    ],
)
def test_show_has_what_follows_the_end(end: EndInfo, shown: str) -> None:
    assert shown in job_details.text(job("a", at_end=(end,))).splitlines()


@pytest.mark.parametrize(
    ("start", "begins", "ends"),
    [
        (StartInfo(90.0, "not before", "--begin"), "not before ", ", in 90.0 s (--begin)"),
        (StartInfo(90.0, "about", "--duration of b"), "about ", ", in 90.0 s (--duration of b)"),
        (
            StartInfo(90.0, "at the latest", "--time-limit of b"),
            "",
            ", in 90.0 s at the latest (--time-limit of b)",
        ),
    ],
)
def test_show_has_the_expected_start(start: StartInfo, begins: str, ends: str) -> None:
    (line,) = [
        line for line in job_details.text(job("a", start=start)).splitlines() if line.startswith("expected")
    ]
    assert line.startswith(f"expected start  {begins}")
    assert line.endswith(ends)


@pytest.mark.parametrize(
    ("text", "columns", "shown"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "ab…"),
        ("ab cd", 4, "ab…"),
        ("学習は", 6, "学習は"),
        ("学習は", 5, "学習…"),
        ("学習は", 4, "学…"),
        ("e\u0301e\u0301e\u0301", 2, "e\u0301…"),
        ("abc", 0, ""),
    ],
)
def test_text_is_cut_by_what_it_takes_on_the_screen(text: str, columns: int, shown: str) -> None:
    assert cut(text, columns) == shown
    assert width(shown) <= columns
    assert width(padded(shown, 8)) == 8


def test_names_keep_their_end() -> None:
    for text, columns, shown in (
        ("train-resnet-50-seed-12", 14, "train-r…eed-12"),
        ("train", 5, "train"),
        ("trains", 5, "tra…s"),
        ("学習学習学習", 7, "学習…習"),
        ("abc", 1, "…"),
    ):
        assert cut_inside(text, columns) == shown
        assert width(shown) <= columns


def test_what_could_move_the_cursor_is_not_printed() -> None:
    assert one_line("a\nb\tc\x1b[31m\x07 d") == "a b c [31m  d"
    assert io.StringIO(one_line("a\r\nb")).read() == "a b"
