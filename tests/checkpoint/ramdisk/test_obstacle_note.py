"""The note of why a job could not be saved: the next process finds it once, and prints it as plain text."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuslice.checkpoint.ramdisk.obstacle_note import take_note, write_note
from gpuslice.errors import RefusedSnapshotError


def test_a_note_is_replaced_and_taken_once(tmp_path: Path) -> None:
    assert take_note(tmp_path) == ""
    write_note(tmp_path, "a longer reason")
    write_note(tmp_path, "optimizer.it is a cycle")
    assert take_note(tmp_path) == "optimizer.it is a cycle"
    assert take_note(tmp_path) == ""


def test_what_somebody_else_wrote_is_text_or_refused(tmp_path: Path) -> None:
    write_note(tmp_path, "x")
    file = next(tmp_path.iterdir())
    file.write_bytes(b"\x1b[2Jred\n\xff" + b"y" * 9000)
    assert take_note(tmp_path).startswith("[2Jred\ufffdyyy")
    (tmp_path / "other").write_text("x")
    file.symlink_to(tmp_path / "other")
    with pytest.raises(RefusedSnapshotError, match="symbolic link"):
        take_note(tmp_path)
