"""gpuslice: time-slice, suspend, migrate and pack PyTorch training jobs, bit for bit.

The public names load on first use (PEP 562), so ``import gpuslice`` costs milliseconds and never
imports torch by itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuslice.boundaries import boundary as boundary
    from gpuslice.client import Client as Client
    from gpuslice.job import Job as Job
    from gpuslice.job import Snapshot as Snapshot
    from gpuslice.job import attach as attach
    from gpuslice.job import restore as restore
    from gpuslice.losses import report as report

__version__ = "0.1.0"

_HOME = {
    "attach": "gpuslice.job",
    "restore": "gpuslice.job",
    "Job": "gpuslice.job",
    "Snapshot": "gpuslice.job",
    "boundary": "gpuslice.boundaries",
    "Client": "gpuslice.client",
    "report": "gpuslice.losses",
}

__all__ = ["Client", "Job", "Snapshot", "__version__", "attach", "boundary", "report", "restore"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gpuslice' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
