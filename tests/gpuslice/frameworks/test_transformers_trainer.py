"""When a ``Trainer`` of transformers is left alone, and which of its options forbid a restart."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gpuslice.config import Settings
from gpuslice.frameworks import framework_job, transformers_trainer
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.runtime import trainings
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.runtime import Runtime

PLAIN = {
    "world_size": 1,
    "n_gpu": 0,
    "auto_find_batch_size": False,
    "ignore_data_skip": False,
    "eval_on_start": False,
    "dataloader_persistent_workers": False,
    "restore_callback_states_from_checkpoint": False,
    "device": torch.device("cpu"),
}


class Trainer:
    """Says what ``train`` was given."""

    def __init__(self, **options: Any) -> None:
        self.args = SimpleNamespace(**{**PLAIN, **options})
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False
        self.train_dataset, self.data_collator, self.model = [1, 2], len, torch.nn.Linear(2, 2)
        self.callback_handler = SimpleNamespace(callbacks=[], train_dataloader=None)
        self.seen: list[Any] = []

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None) -> Any:
        self.seen = [type(one).__name__ for one in self.callback_handler.callbacks]
        return resume_from_checkpoint

    def add_callback(self, callback: Any) -> None:
        self.callback_handler.callbacks.append(callback)

    def remove_callback(self, callback: Any) -> None:
        self.callback_handler.callbacks.remove(callback)

    def _maybe_log_save_evaluate(self) -> None: ...

    def _load_rng_state(self, checkpoint: str) -> None: ...


@pytest.fixture
def job(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    process = Runtime(
        Settings(ramdisk_dir=str(tmp_path / "ramdisk"), job="k"), RankIdentity(), BoundaryCounter()
    )
    monkeypatch.setattr(framework_job, "runtime", lambda: process)
    yield process
    trainings.close(process)


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> type[Trainer]:
    """Return a ``Trainer`` class that the adapter has changed, of a transformers of that version."""
    package, own = (
        ModuleType("transformers"),
        type("Trainer", (Trainer,), {"__module__": "transformers.trainer"}),
    )
    package.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", package)
    names = {"Trainer": own, "TrainerCallback": object, "skip_first_batches": None}
    transformers_trainer.install(SimpleNamespace(**names), "transformers")
    return own


@pytest.mark.parametrize(
    ("version", "given", "said"),
    [
        ("5.24.1", True, "the script gives resume_from_checkpoint=True itself"),
        ("3.0.2", None, "restarts were tested with transformers 4.57, 5.24, and this is 3.0.2"),
    ],
)
def test_a_trainer_that_resumes_itself_or_is_unknown_is_left_alone(
    job: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: str,
    given: Any,
    said: str,
) -> None:
    trainer = install(monkeypatch, version)()
    assert trainer.train(resume_from_checkpoint=given) == given
    assert job.attached is None
    assert f"gpuslice does not restart this Trainer: {said}\n" in capsys.readouterr().err


def test_a_trainer_is_attached_while_it_trains(job: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = install(monkeypatch, "5.24.0")()
    assert trainer.train() is None
    assert trainer.seen == ["GpusliceCallback"]
    assert trainer.callback_handler.callbacks == []
    assert job.attached is not None
    assert not job.attached.obstacle
    assert not job.attached.restartable_later  # it has ended
    trainer.train()
    assert job.attachments == 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"world_size": 2}, "it has several ranks or GPUs"),
        ({"ignore_data_skip": True}, "ignore_data_skip is set"),
        ({"dataloader_persistent_workers": True}, "dataloader_persistent_workers is set"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size is set"),
    ],
)
def test_options_under_which_no_resume_is_exact_are_named(
    job: Runtime, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], why: str
) -> None:
    install(monkeypatch, "5.24.0")(**options).train()
    assert job.attached is not None
    assert job.attached.obstacle == why
