"""The demonstration's training on wines, held up: held.py FILE [ARGUMENTS]... waits for FILE after 50 steps.

While it waits it passes boundaries: it reads batches of something else. So it can be suspended and moved, and
its model is that of the training alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from gpuslice.demo.jobs import wine

HELD_AFTER_STEPS = 50
_file = Path(sys.argv.pop(1))


class HeldLoader(DataLoader[Any]):
    """A loader that gives no more batches than so many while there is no such file."""

    given = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            if self.given >= HELD_AFTER_STEPS:
                wait()
            self.given += 1
            yield batch


def wait() -> None:
    """Pass boundaries until the file is there."""
    others = DataLoader(range(1), generator=torch.Generator())  # type: ignore[var-annotated, arg-type]
    while not _file.exists():
        for _ in others:
            time.sleep(0.01)


if __name__ == "__main__":
    wine.DataLoader = HeldLoader  # type: ignore[attr-defined]
    wine.main()
