"""When a ``Trainer`` of Lightning is left alone, and what of it forbids a restart."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gpuslice.config import Settings
from gpuslice.frameworks import framework_job, lightning_trainer
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.runtime import trainings
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.runtime import Runtime


class Trainer:
    """Says what ``fit`` was given."""

    def __init__(self, *callbacks: object, **options: Any) -> None:
        self.callbacks, self.world_size = list(callbacks), options.get("world_size", 1)
        self.reload_dataloaders_every_n_epochs = options.get("reload", 0)
        self.strategy = SimpleNamespace(root_device=torch.device("cpu"))
        epoch_loop = SimpleNamespace(advance=None, on_advance_end=None)
        self.fit_loop = SimpleNamespace(epoch_loop=epoch_loop, _combined_loader=None)

    def fit(self, model: Any, train_dataloaders: Any = None, ckpt_path: Any = None) -> Any:
        return ckpt_path


class Model(torch.nn.Linear):
    automatic_optimization = True


@pytest.fixture
def job(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    settings = Settings(ramdisk_dir=str(tmp_path / "ramdisk"), job="k")
    process = Runtime(settings, RankIdentity(), BoundaryCounter())
    monkeypatch.setattr(framework_job, "runtime", lambda: process)
    yield process
    trainings.close(process)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> type[Trainer]:
    """Return a ``Trainer`` class that the adapter has changed, of a Lightning that was tested."""
    own = type("Trainer", (Trainer,), {})
    parts: dict[str, dict[str, Any]] = {
        "pytorch_lightning": {"__version__": "2.5.6"},
        "pytorch_lightning.utilities.combined_loader": {"CombinedLoader": type("C", (), {"__iter__": iter})},
        "pytorch_lightning.loops.fit_loop": {"_set_sampler_epoch": None},
    }
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    module = SimpleNamespace(Trainer=own, __name__="pytorch_lightning.trainer.trainer")
    lightning_trainer.install(module, "pytorch_lightning")
    return own


def test_a_trainer_that_resumes_itself_or_is_unknown_is_left_alone(
    job: Runtime, trainer: type[Trainer], capsys: pytest.CaptureFixture[str]
) -> None:
    assert trainer().fit(Model(2, 2), ckpt_path="last") == "last"
    assert "the script gives ckpt_path='last' itself\n" in capsys.readouterr().err
    sys.modules["pytorch_lightning"].__version__ = "1.0.8"  # type: ignore[attr-defined]
    assert trainer().fit(Model(2, 2)) is None
    assert "tested with pytorch_lightning 2.5, 2.6, and this is 1.0.8\n" in capsys.readouterr().err
    assert job.attached is None


def test_a_trainer_is_attached_while_it_fits(job: Runtime, trainer: type[Trainer]) -> None:
    trainer().fit(Model(2, 2))
    assert job.attached is not None
    assert not job.attached.obstacle


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"world_size": 2}, "it has several ranks"),
        ({"reload": 1}, "reload_dataloaders_every_n_epochs is set"),
    ],
)
def test_options_under_which_no_resume_is_exact_are_named(
    job: Runtime, trainer: type[Trainer], options: dict[str, Any], why: str
) -> None:
    trainer(**options).fit(Model(2, 2))
    assert job.attached is not None
    assert job.attached.obstacle == why


def test_a_callback_of_lightning_that_was_not_tested_is_named(job: Runtime, trainer: type[Trainer]) -> None:
    averaging = type("Averaging", (), {"__module__": "pytorch_lightning.callbacks.averaging"})()
    trainer(averaging).fit(Model(2, 2))
    assert job.attached is not None
    assert job.attached.obstacle == "the callback Averaging was not tested"
