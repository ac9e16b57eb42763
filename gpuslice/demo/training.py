"""The demonstration's jobs: unmodified scripts, how they are started, and what they printed."""

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
    """One script.

    Attributes
    ----------
    name
        Its name, and the script's without ``.py``.
    about
        What it trains on what, in a few words.
    steps
        Optimizer steps.
    options
        Further arguments.
    """

    name: str
    about: str
    steps: int
    options: tuple[str, ...] = ()

    def words(self, device: str) -> list[str]:
        """The script and its arguments, for ``device`` as torch names it."""
        return [
            str(SCRIPTS / f"{self.name}.py"),
            "--steps",
            str(self.steps),
            "--device",
            device,
            *self.options,
        ]


TRAININGS = (
    Training("chars", "transformer, Alice in Wonderland", 160),
    Training("digits", "CNN, handwritten digits", 450),
    Training("wine", "wide MLP with Adam, wines", 80, ("--width", "4096")),
)


def steady(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without gpuslice's own variables, and with what makes two runs compute alike.

    The order of floating-point sums depends on the number of threads and, on a GPU, on cuBLAS' workspaces.
    """
    result = {name: value for name, value in environ.items() if not name.startswith("GPUSLICE_")}
    return result | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def digest(output: Path) -> str:
    """The digest of the finished model in a script's output; empty if there is none."""
    found = _DIGEST.search(output.read_text(encoding="utf-8", errors="replace"))
    return found[1] if found else ""


def last_loss(output: Path) -> float | None:
    """The last loss that the script printed, if any."""
    losses = _LOSS.findall(output.read_text(encoding="utf-8", errors="replace"))
    return float(losses[-1]) if losses else None
