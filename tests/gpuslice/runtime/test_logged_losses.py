"""What a process reports of its training loss."""

from __future__ import annotations

import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch

import gpuslice
from gpuslice.errors import UsageError
from gpuslice.runtime import logged_losses
from gpuslice.runtime.logged_losses import Losses

LIGHTNING = "lightning.pytorch.trainer.connectors.logger_connector.logger_connector"


def test_numbers_and_tensors_of_one_element() -> None:
    own = Losses()
    assert own.newest is None
    own.report(loss=2)
    assert own.newest == 2.0
    own.report(loss=torch.tensor(0.5, requires_grad=True))  # type: ignore[arg-type]
    assert own.newest == 0.5


def test_what_is_not_finite_is_not_reported() -> None:
    own = Losses()
    own.report(loss=1.0)
    for value in (float("nan"), float("inf"), -float("inf")):
        own.report(loss=value)
    assert own.newest == 1.0


@pytest.mark.parametrize("value", [None, "low", [1.0, 2.0], torch.zeros(2)])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="is no number"):
        Losses().report(loss=value)


def test_it_is_public_and_the_process_has_one() -> None:
    assert gpuslice.report == logged_losses.report


@pytest.mark.parametrize("name", [name for name in gpuslice.__all__ if name != "__version__"])
def test_no_module_hides_a_public_name(name: str) -> None:
    """Importing a module of that name would put it in the place of what the name means."""
    assert importlib.util.find_spec(f"gpuslice.{name}") is None


class Handler:
    """What Hugging Face's ``CallbackHandler`` is to us."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any]) -> str:
        self.seen.append(logs)
        return "control"


class Connector:
    """What Lightning's ``_LoggerConnector`` is to us."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log."""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that puts a module of such a name, with such a class, among those imported."""

    def put(name: str, cls: str, handler: type[Any]) -> types.ModuleType:
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        setattr(module, cls, handler)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    for name in logged_losses._LOGGERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return put


def copied(handler: type[Any]) -> type[Any]:
    return type(handler.__name__, (handler,), dict(vars(handler)))


def test_what_trainer_logs_is_read_and_its_answer_is_its_own(library: Any) -> None:
    own, handler = Losses(), copied(Handler)
    own.follow_libraries()
    library("transformers.trainer_callback", "CallbackHandler", handler)
    own.follow_libraries()
    own.follow_libraries()
    made = handler()
    assert made.on_log(None, None, None, {"loss": 0.75, "learning_rate": 1.0}) == "control"
    assert own.newest == 0.75
    made.on_log(None, None, None, {"eval_loss": 3.0})
    made.on_log(None, None, None, logs={"loss": 0.25})
    made.on_log(None, None, None, {"train_loss": 0.7, "train_runtime": 9.0})
    assert (own.newest, len(made.seen)) == (0.25, 4)


def test_what_lightning_logs_is_read(library: Any) -> None:
    own, handler = Losses(), copied(Connector)
    library(LIGHTNING, "_LoggerConnector", handler)
    own.follow_libraries()
    handler().log_metrics({"train_loss": torch.tensor(0.5), "epoch": 1})
    assert own.newest == 0.5
    handler().log_metrics({"train_loss": "low"})
    handler().log_metrics(metrics={"val_loss": 9.0}, step=3)
    assert own.newest == 0.5


def test_what_the_script_says_itself_comes_first(library: Any) -> None:
    own, handler = Losses(), copied(Connector)
    library(LIGHTNING, "_LoggerConnector", handler)
    own.follow_libraries()
    own.report(loss=0.125)
    handler().log_metrics({"loss": 7.0})
    assert own.newest == 0.125


def test_a_library_that_is_still_being_imported_is_left_alone(library: Any) -> None:
    own, handler = Losses(), copied(Connector)
    module = library(LIGHTNING, "_LoggerConnector", handler)
    plain = handler.log_metrics
    module.__spec__._initializing = True
    own.follow_libraries()
    assert handler.log_metrics is plain
    module.__spec__._initializing = False
    own.follow_libraries()
    assert handler.log_metrics is not plain


def test_a_library_that_has_changed_is_left_alone(library: Any) -> None:
    own = Losses()
    library(LIGHTNING, "_OtherConnector", copied(Connector))
    own.follow_libraries()
    assert own.newest is None
