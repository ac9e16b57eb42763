"""The demonstration's jobs: unmodified scripts, their commands, and their output."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent / "jobs"
_DIGEST = re.compile(r"^digest ([0-9a-f]{64})$", re.MULTILINE)
_LOSS = re.compile(r"^step \d+ loss (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Training:
    """One script of the demonstration.

    Attributes
    ----------
    name
        Name of the job, and of the script without ``.py``.
    about
        Model and data, in a few words.
    steps
        Number of optimizer steps.
    options
        Further arguments of the script.
    """

    name: str
    about: str
    steps: int
    options: tuple[str, ...] = ()

    def words(self, device: str) -> list[str]:
        """Return the script's path and its arguments. ``device`` is torch's name."""
        return [
            str(SCRIPTS / f"{self.name}.py"),
            "--steps",
            str(self.steps),
            "--device",
            device,
            *self.options,
        ]


TRAININGS = (
    Training("chars", "transformer, Alice in Wonderland", 240),
    Training("digits", "CNN, handwritten digits", 650),
    Training("wine", "wide MLP with Adam, wines", 48, ("--width", "4096")),
)


def steady(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without gpuslice's variables, and with settings that make two runs compute alike.

    The order of floating-point sums depends on the number of threads and, on a GPU, on cuBLAS' workspaces.
    """
    result = {name: value for name, value in environ.items() if not name.startswith("GPUSLICE_")}
    return result | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def digest(output: Path) -> str:
    """Return the finished model's digest from a script's output; empty if there is none."""
    found = _DIGEST.search(output.read_text(encoding="utf-8", errors="replace"))
    return found[1] if found else ""


def last_loss(output: Path) -> float | None:
    """Return the last loss in a script's output; None if there is none."""
    losses = _LOSS.findall(output.read_text(encoding="utf-8", errors="replace"))
    return float(losses[-1]) if losses else None
