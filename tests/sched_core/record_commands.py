"""Make the digests of the core's commands anew, by the tests that drive a core by themselves.

Run ``python tests/sched_core/record_commands.py [FILE ...]``, then these tests: they compare. With files only
the digests of their tests are made.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.sched_core.command_record import RECORDED, read, write  # noqa: E402 (its package is above this folder)

#: Who imports one of these drives a core by itself.
_DRIVERS = re.compile(r"^from \.+(?:driver|relocating|packing_world|command_record) import", re.MULTILINE)
#: What has processes and a clock of its own is left out, and what takes long.
_LIVE = ("live", "sim")
_QUICK = "not slow and not gangs and not nodes and not ray and not trainings"


class _Recording:
    """A plug-in of pytest that has ``conftest`` record."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[RECORDED] = self.digests


def main() -> int:
    """Record, and say how many tests are in the record; with tests that fail it is left as it is."""
    recording, chosen = _Recording(), sys.argv[1:]
    found = [path for path in sorted(HERE.rglob("test_*.py")) if path.parent.name not in _LIVE]
    files = chosen or [str(path) for path in found if _DRIVERS.search(path.read_text())]
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-m", _QUICK, *files], plugins=[recording])
    if code == 0:
        digests = (read() if chosen else {}) | recording.digests
        write({name: digest for name, digest in digests.items() if digest})
        print(f"{len(read())} tests are in the record")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
