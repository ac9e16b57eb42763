"""The log: one JSON object per line, bounded, and never in the way."""

from __future__ import annotations

import json
import logging
from datetime import datetime
from pathlib import Path
from typing import Any

from gpuslice.daemon import event_log


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_line_has_the_documented_keys(tmp_path: Path) -> None:
    with event_log.kept_in(tmp_path):
        event_log.tell("state", "job a: queued -> starting", job="a", details={"epoch": 1, "path": tmp_path})
        logging.getLogger("gpuslice.sched_core.live.scheduler").warning(
            "rejected\na message of %s", "a stranger"
        )
        try:
            raise RuntimeError("oh")
        except RuntimeError:
            logging.getLogger("gpuslice").exception("failed")
    logging.getLogger("gpuslice").warning("after the end")
    state, warning, failure = lines(tmp_path / event_log.FILE)
    assert list(state) == ["time", "level", "event", "job", "message", "details"]
    assert datetime.fromisoformat(state["time"]).tzinfo is not None
    assert (state["level"], state["event"], state["job"]) == ("info", "state", "a")
    assert state["details"] == {"epoch": 1, "path": str(tmp_path)}
    assert (warning["level"], warning["event"]) == ("warning", "message")
    assert warning["message"] == "rejected\na message of a stranger"
    assert failure["level"] == "error"
    assert "RuntimeError: oh" in failure["details"]["traceback"]


def test_it_is_bounded(tmp_path: Path) -> None:
    with event_log.kept_in(tmp_path, most_bytes=2000):
        for number in range(200):
            event_log.tell("state", f"number {number}")
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [
        event_log.FILE,
        *(f"{event_log.FILE}.{number}" for number in (1, 2, 3)),
    ]
    assert all(file.stat().st_size <= 2000 for file in files)
    assert lines(tmp_path / event_log.FILE)[-1]["message"] == "number 199"
