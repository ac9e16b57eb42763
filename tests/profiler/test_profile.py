"""The profile: its JSON has the documented keys, and its page the JSON's numbers."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec

from gpuslice.profiler.memory import MemoryUse, unaccounted
from gpuslice.profiler.profile import Profile, headline, make_profile, page, summary
from gpuslice.profiler.recorder import Recording
from gpuslice.profiler.sampler import DeviceUse
from gpuslice.profiler.skew import measure_skew
from gpuslice.profiler.steps import Change

PAGE = Path(__file__).resolve().parents[2] / "docs" / "json.md"
MIB = 1 << 20
MEMORY = MemoryUse(200 * MIB, 150 * MIB, 100 * MIB, 20 * MIB, 10 * MIB, None)


def recording(count: int = 100) -> Recording:
    """Steps of 10 ms, a stall in interval 50, an evaluation in interval 60, a first step of 80 ms."""
    interval_s, fetching_s, batches, without_grad = [0.01] * count, [0.001] * count, [1] * count, [0] * count
    if count > 60:
        interval_s[0], interval_s[50], fetching_s[50] = 0.08, 0.5, 0.491
        interval_s[60], batches[60], without_grad[60] = 0.3, 9, 8
    return Recording(
        rank=0,
        clock="monotonic",
        interval_s=interval_s,
        fetching_s=fetching_s,
        after_step_s=[0.0] * count,
        batches=batches,
        without_grad=without_grad,
        recorder_s=0.001,
        total_s=sum(interval_s) or 1.0,
        memory=MEMORY,
        skew=measure_skew([600, 300, 100]),
    )


DEVICES = [DeviceUse("cuda:0", 87.5, 4000.0, 300.0, 9)]


def test_the_json_has_the_documented_keys() -> None:
    found = msgspec.json.decode(msgspec.json.encode(make_profile(recording(), DEVICES)))
    text = PAGE.read_text(encoding="utf-8")
    keys = [*found, *found["step_seconds"], *found["memory"], *found["skew"], *found["devices"][0]]
    assert [key for key in keys if f"`{key}`" not in text] == []
    assert (found["steps"], found["warmup_steps"], found["overhead"]) == (
        97,
        1,
        0.001 / sum(recording().interval_s),
    )
    assert {name: phase["count"] for name, phase in found["phases"].items()} == {
        "evaluation": 1,
        "data_stall": 1,
        "pause": 0,
    }
    assert msgspec.convert(found, Profile) == make_profile(recording(), DEVICES)


def test_the_page_shows_what_the_json_says() -> None:
    profile = make_profile(recording(), DEVICES)
    text = page("train.py --lr <1>", profile, recording())
    assert "<h1>A step of train.py --lr &lt;1&gt; takes 10 ms; 10.0 % of it waits for data</h1>" in text
    for figure, value in summary(profile):
        assert f"<td>{figure}</td><td>{value}</td>" in text
    figures = [ElementTree.fromstring(svg) for svg in re.findall(r"<figure.*?</figure>", text)]
    assert len(figures) == 2
    dots = {path.findtext("title"): path.get("d", "").count("M") for path in figures[0].iter("path")}
    assert dots == {"warmup": 1, "step": 97, "evaluation": 1, "data stall": 1}
    assert [name for name in dots if f"</svg>{name}</li>" not in text] == [], "the key names all of them"
    assert "http" not in text
    assert '<td class="number">50</td><td>data stall</td><td class="number">500</td>' in text
    assert "At the upper edge are 3 that take longer than the axis." in text
    assert [figure.findtext("h3") for figure in figures] == [
        "Time of each interval, ms",
        "Share of steps that take at most",
    ]


def test_one_far_longer_step_does_not_press_the_others_together() -> None:
    text = page("x", make_profile(slow := recording(400)), slow)
    assert "of 397 steps take longer" not in text
    slow.interval_s[200] = 2.0
    profile = make_profile(slow)
    text = page("x", profile, slow)
    (drawn,) = re.findall(r'<polyline.*?points="([^"]*)"', text)
    xs = [float(point.split(",")[0]) for point in drawn.split()]
    assert 500 < sorted(xs)[100] < 1000


def test_a_step_time_that_changed_is_said_in_the_headline() -> None:
    found = msgspec.structs.replace(make_profile(recording()), changes=(Change(50, 0.01, 0.02),))
    assert headline("x", found) == "A step of x takes 10 ms, but changed once; 10.0 % of it waits for data"


def test_a_script_without_steps_has_a_profile_too() -> None:
    empty = make_profile(recording(0))
    assert empty.step_seconds is None
    assert "<svg" not in page("x", empty, recording(0))
    assert "<h1>x made too few steps for a profile</h1>" in page("x", empty, recording(0))


def test_what_is_not_told_says_so() -> None:
    rows = dict(summary(make_profile(recording())))
    assert rows["memory, peak"] == "200.0 MiB"
    assert rows["memory, unaccounted"] == "not told"


def test_what_nothing_accounts_for() -> None:
    assert unaccounted(100, 50, 20, 10) == 20
    assert unaccounted(100, 50, 60) == 0
    assert unaccounted(100, 50, None) is None
    assert unaccounted(None, 50) is None
