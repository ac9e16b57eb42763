"""The training loss that this process reports to its scheduler (docs/training-scripts.md, Losses).

A script says it by ``gpuslice.report(loss=...)``. What Hugging Face's ``Trainer`` and Lightning log is read
as they log it, so that their scripts need not. Policies such as ``optimus`` and ``slaq`` use the newest one.
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

#: Class and method of each library that is handed what is logged, by module, and the argument's position.
_LOGGERS = {
    "transformers.trainer_callback": ("CallbackHandler", "on_log", 4),
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector": (
        *("_LoggerConnector", "log_metrics", 1),
    ),
    "pytorch_lightning.trainer.connectors.logger_connector.logger_connector": (
        *("_LoggerConnector", "log_metrics", 1),
    ),
}
#: What a training loss is logged as, best first.
_NAMES = (
    *("loss", "loss_step", "train_loss", "train_loss_step", "train/loss", "train/loss_step"),
    "training_loss",
)
#: What Trainer logs with the average of the whole run, which is no newer loss.
_AT_THE_END = "train_runtime"


class Losses:
    """The newest loss of this process.

    Attributes
    ----------
    newest
        ``None`` until there is one.
    """

    def __init__(self) -> None:
        self.newest: float | None = None
        self._own = False
        self._waited_for = dict(_LOGGERS)

    def report(self, *, loss: float) -> None:
        """Tell the scheduler of the newest training loss; without a scheduler, nothing happens.

        Cheap enough for every step, but for a tensor on a GPU, whose value has to be waited for. A loss
        that is not finite is not reported. Where the script calls this, what libraries log no longer counts.

        Parameters
        ----------
        loss
            A number, or a tensor of one element.

        Raises
        ------
        UsageError
            If it is neither.
        """
        try:
            value = float(_plain(loss))
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"the loss {loss!r} is no number", "report loss=loss.item()") from error
        self._own = True
        self._take(value)

    def follow_libraries(self) -> None:
        """Read from now on what libraries log that have been imported since; for any thread, now and then."""
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
    """``loss`` without its graph, if it is a tensor."""
    detach = getattr(loss, "detach", None)
    return loss if detach is None else detach()


_process = Losses()
report = _process.report
follow_libraries = _process.follow_libraries


def newest() -> float | None:
    """The newest loss of this process, if it reported any."""
    return _process.newest
