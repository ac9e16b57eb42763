"""gpuslice: time-slice, suspend, migrate and pack PyTorch training jobs, bit for bit.

The public names load on first use (PEP 562), so ``import gpuslice`` costs milliseconds and never
imports torch by itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gpuslice.version import __version__ as __version__

if TYPE_CHECKING:
    from gpuslice.client.client import Client as Client
    from gpuslice.errors import TensorParkedError as TensorParkedError
    from gpuslice.runtime.boundaries import boundary as boundary
    from gpuslice.runtime.job import Job as Job
    from gpuslice.runtime.job import attach as attach
    from gpuslice.runtime.job import restore as restore
    from gpuslice.runtime.logged_losses import report as report
    from gpuslice.training.snapshot import Snapshot as Snapshot

_HOME = {
    "attach": "gpuslice.runtime.job",
    "restore": "gpuslice.runtime.job",
    "Job": "gpuslice.runtime.job",
    "Snapshot": "gpuslice.training.snapshot",
    "boundary": "gpuslice.runtime.boundaries",
    "Client": "gpuslice.client.client",
    "report": "gpuslice.runtime.logged_losses",
    "TensorParkedError": "gpuslice.errors",
}

__all__ = ["Client", "Job", "Snapshot", "__version__", "attach", "boundary", "report", "restore"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gpuslice' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
