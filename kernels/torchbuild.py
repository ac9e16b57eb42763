"""Which torch is installed, read from its version file: importing it takes seconds."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

#: A name of ``torch/version.py`` and its text; a CUDA of ``None`` is none.
_CONSTANT = re.compile(r"""^(\w+)[^=\n]*= *['"]([^'"]*)['"]$""", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """An installed torch.

    Attributes
    ----------
    version
        ``"2.13.0+cpu"``.
    cuda
        The CUDA it was built for, ``"13.0"``, or ``None`` for a build without.
    """

    version: str
    cuda: str | None

    @property
    def cuda_major(self) -> int | None:
        """13 of ``"13.0"``."""
        return int(self.cuda.split(".")[0]) if self.cuda else None


def installed_torch() -> TorchBuild | None:
    """The torch that ``import torch`` would give, or ``None``."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        return read_version_file(Path(spec.origin).with_name("version.py"))
    except OSError:
        return None


def read_version_file(path: Path) -> TorchBuild:
    """Read the constants of a ``torch/version.py`` without running it."""
    constants = dict(_CONSTANT.findall(path.read_text(encoding="utf-8")))
    return TorchBuild(constants.get("__version__", "unknown"), constants.get("cuda"))
