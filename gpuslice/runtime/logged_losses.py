"""The training loss that this process reports to its scheduler (docs/training-scripts.md, Losses).

A script reports it by ``gpuslice.report(loss=...)``. Scripts of Hugging Face's ``Trainer`` and of Lightning
need not: what these log is read. Policies such as ``optimus`` and ``slaq`` use the newest loss.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import msgspec

from gpuslice.errors import UsageError, hide_own_frames
from gpuslice.types import Loss

#: By module of a library: the class and method that receive what is logged, and the argument's position.
_LOGGERS = {
    "transformers.trainer_callback": ("CallbackHandler", "on_log", 4),
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector": (
        *("_LoggerConnector", "log_metrics", 1),
    ),
    "pytorch_lightning.trainer.connectors.logger_connector.logger_connector": (
        *("_LoggerConnector", "log_metrics", 1),
    ),
}
#: Names under which a training loss is logged, best first.
_NAMES = (
    *("loss", "loss_step", "train_loss", "train_loss_step", "train/loss", "train/loss_step"),
    "training_loss",
)
#: Trainer logs this name together with the average loss of the whole run, which is not the newest loss.
_AT_THE_END = "train_runtime"


class Losses:
    """The newest loss of this process.

    Attributes
    ----------
    newest
        The newest loss; None until there is one.
    """

    def __init__(self) -> None:
        self.newest: float | None = None
        self._own = False
        self._waited_for = dict(_LOGGERS)

    def report(self, *, loss: float) -> None:
        """Report the newest training loss to the scheduler. Without a scheduler, nothing happens.

        A call is cheap enough for every step, except with a tensor on a GPU, whose value has to be waited
        for. A loss that is not finite is not reported. After the first call, what libraries log is ignored.

        Parameters
        ----------
        loss
            A number, or a tensor of one element.

        Raises
        ------
        UsageError
            If ``loss`` is neither.
        """
        try:
            value = float(_plain(loss))
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"the loss {loss!r} is no number", "report loss=loss.item()") from error
        self._own = True
        self._take(value)

    def follow_libraries(self) -> None:
        """Read what newly imported libraries log from now on. Call this now and then, in any thread."""
        for name in list(self._waited_for):
            module = sys.modules.get(name)
            spec = getattr(module, "__spec__", None)
            if module is None or getattr(spec, "_initializing", False):
                continue
            owner, method, position = self._waited_for.pop(name)
            handler: Any = getattr(module, owner, None)
            original = getattr(handler, method, None)
            if original is not None:
                setattr(handler, method, self._reading(original, position))

    def _reading(self, original: Callable[..., Any], position: int) -> Callable[..., Any]:
        @functools.wraps(original)
        def reading(*args: Any, **kwargs: Any) -> Any:
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                hide_own_frames(error)
                raise
            logged = args[position] if len(args) > position else kwargs.get("logs", kwargs.get("metrics"))
            if not self._own and isinstance(logged, Mapping):
                self._read(logged)
            return result

        return reading

    def _read(self, logged: Mapping[str, Any]) -> None:
        if _AT_THE_END in logged:
            return
        value = next((logged[name] for name in _NAMES if name in logged), None)
        if value is None:
            return
        try:
            self._take(float(_plain(value)))
        except (TypeError, ValueError, RuntimeError):
            return  # somebody else's idea of a loss: an average of several, a text

    def _take(self, value: float) -> None:
        if isfinite(value):
            self.newest = msgspec.convert(max(-1e300, min(value, 1e300)), Loss)


def _plain(loss: Any) -> Any:
    """Return ``loss`` without its autograd graph if it is a tensor; else ``loss`` itself."""
    detach = getattr(loss, "detach", None)
    return loss if detach is None else detach()


_process = Losses()
report = _process.report
follow_libraries = _process.follow_libraries


def newest() -> float | None:
    """Return the newest loss of this process; None if it has none."""
    return _process.newest
