"""What a script imports after torch is hidden from looks at the heap, too, before its first module is made.

Libraries such as Lightning and transformers leave as many objects as torch does, and a suspend that looks at
all of them takes longer to find a model than to move it.
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
    """At the first ``Module()`` outside of imports hide everything, if nothing lives that a look must find.

    Until then ``Module.__init__`` is wrapped. A script that has made tensors before keeps what it had.
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
    """The live objects of every kind that a suspend or a move looks for."""
    on_gpus = torch.cuda.Stream, torch.cuda.Event, torch.cuda.CUDAGraph
    return look(torch.Tensor, torch.UntypedStorage, *on_gpus, *foreign_arrays.kinds())
