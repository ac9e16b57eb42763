"""Hides what a script imports after torch from searches of the heap, when it makes its first module.

Libraries such as Lightning and transformers leave as many objects as torch does. A suspend that looks at all
of these objects takes longer to find a model than to move it.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

import torch
from torch import nn

from gpuslice.checkpoint.discover import foreign_arrays
from gpuslice.checkpoint.discover.heap import hide_imports, look
from gpuslice.errors import hide_own_frames

_IMPORTLIB = "<frozen importlib._bootstrap>"


def hide_before_the_first_module() -> None:
    """Hide all objects from heap searches when the script makes its first module outside of an import.

    Nothing is hidden if the script has made a tensor, or another object that a suspend must find, before.
    Until then ``Module.__init__`` is wrapped.
    """
    original = nn.Module.__init__

    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if nn.Module.__init__ is init and not _is_importing(sys._getframe(1)):
            nn.Module.__init__ = original  # type: ignore[method-assign]
            if not any(_sought()):
                hide_imports()
        try:
            original(self, *args, **kwargs)
        except BaseException as error:
            hide_own_frames(error)
            raise

    nn.Module.__init__ = init  # type: ignore[method-assign]


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTLIB:
            return True
        frame = frame.f_back
    return False


def _sought() -> list[list[Any]]:
    """Return the live objects of each kind that a suspend or a move looks for."""
    on_gpus = torch.cuda.Stream, torch.cuda.Event, torch.cuda.CUDAGraph
    return look(torch.Tensor, torch.UntypedStorage, *on_gpus, *foreign_arrays.kinds())
