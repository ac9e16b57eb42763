"""The ends that an agent starts: of one channel there is one."""

from __future__ import annotations

from pathlib import Path

from gpuslice.nodes.end_process import Ends
from gpuslice.nodes.plan import Config
from gpuslice.sched_core.nodes import curve


def test_an_end_takes_the_place_of_one_of_its_channel_that_may_keep_slots(tmp_path: Path) -> None:
    curve.make(tmp_path / "keys")
    curve.add(tmp_path / "keys", "ours", tmp_path / "ours")
    server, own = curve.client_keys(tmp_path / "ours")
    told = server.decode(), own.public.decode(), own.secret.decode()
    ends = Ends(Config("b", "tcp://127.0.0.1:1", *told), tmp_path, tmp_path / "log")
    for channel in ("one", "other"):
        ends.start(channel)
    first, other = ends._started["one"], ends._started["other"]
    ends.start("one")
    second = ends._started["one"]
    try:
        assert first.poll() is not None
        assert [process.poll() for process in (other, second)] == [None, None]
    finally:
        for process in (other, second):
            process.kill()
