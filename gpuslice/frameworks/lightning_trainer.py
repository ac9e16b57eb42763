"""Restarts ``Trainer`` of Lightning by its own checkpoints.

``Trainer.fit`` gets the newest checkpoint of the job. It counts a boundary after each optimizer step, but
none after the last batch of an epoch and after a batch with a validation: a resumed Lightning would do what
follows twice, or not at all. Lightning does not skip the batches that are done. That is done here.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpuslice.frameworks.adapters import version_of
from gpuslice.frameworks.framework_job import FrameworkJob, process_to_restart
from gpuslice.frameworks.unsaved import changed, unsaved_state

_FILE, _BATCHES = "lightning.ckpt", "batches"
#: Lightning's callbacks whose state is in its checkpoints, or that have none.
_KNOWN = {
    *(
        "ModelCheckpoint",
        "EarlyStopping",
        "LearningRateMonitor",
        "DeviceStatsMonitor",
        "OnExceptionCheckpoint",
    ),
    *("ProgressBar", "TQDMProgressBar", "RichProgressBar", "ModelSummary", "RichModelSummary"),
}


def install(module: Any, package: str) -> None:
    """Have ``Trainer.fit`` in ``module`` go on from the job's newest snapshot."""
    trainer, fit = module.Trainer, module.Trainer.fit
    signature = inspect.signature(fit)
    root = module.__name__.removesuffix(".trainer.trainer")

    @functools.wraps(fit)
    def with_restarts(self: Any, *words: Any, **named: Any) -> Any:
        bound = signature.bind(self, *words, **named)
        job = _job(self, package, bound.arguments)
        if job is not None and "weights_only" in signature.parameters:
            job.refusal = job.refusal or refusal_of_loading(bound.arguments)
        if job is None:
            return fit(self, *words, **named)
        if job.checkpoint is not None:
            bound.arguments["ckpt_path"] = str(job.checkpoint / _FILE)
        with _watched(self, root, job, bound.arguments["model"]):
            return fit(*bound.args, **bound.kwargs)

    trainer.fit = with_restarts


def _job(trainer: Any, package: str, given: dict[str, Any]) -> FrameworkJob | None:
    """Attach the trainer's training and return it. Return None, and say why, if that is not possible."""
    path = given.get("ckpt_path")
    process = process_to_restart(package, f"ckpt_path={path!r}" if path else "")
    if process is None:
        return None
    own = enumerate(_callbacks(trainer))
    kept: dict[str, object] = {f"callback {type(one).__name__} {n}": one for n, one in own}
    loader = given.get("train_dataloaders")
    kept["data"] = [getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)]
    job = FrameworkJob(process, f"{package} {version_of(package)}", functools.partial(_save, trainer), kept)
    job.refusal = _refusal(trainer, given["model"])
    job.attach(trainer.strategy.root_device)
    return job


def _callbacks(trainer: Any) -> list[Any]:
    """Return the callbacks of the script's own, whose attributes are kept."""
    return [one for one in trainer.callbacks if not _is_lightnings(one)]


def _is_lightnings(callback: object) -> bool:
    return type(callback).__module__.startswith(("lightning.", "pytorch_lightning."))


def _refusal(trainer: Any, model: Any) -> str:
    """Return why this trainer cannot be restarted exactly; empty if it can."""
    unknown = [one for one in trainer.callbacks if _is_lightnings(one) and type(one).__name__ not in _KNOWN]
    reasons = {
        "it has several ranks": trainer.world_size > 1,
        "it optimizes by hand": not model.automatic_optimization,
        "reload_dataloaders_every_n_epochs is set": trainer.reload_dataloaders_every_n_epochs,
        "it validates by the clock": getattr(trainer, "_val_check_time_interval", None) is not None,
        f"the callback {type(unknown[0]).__name__} was not tested" if unknown else "": bool(unknown),
    }
    return next((reason for reason, found in reasons.items() if found), "")


def refusal_of_loading(given: dict[str, Any]) -> str:
    """Return why Lightning, which loads plain values only, could not load a checkpoint; empty if it can."""
    parts = [part for part in (given["model"], given.get("datamodule")) if part is not None]
    if given.get("weights_only") is False or _loads([dict(part.hparams) for part in parts]):
        return ""
    return "Lightning loads its hyper-parameters only if `fit` gets weights_only=False"


def _loads(values: object) -> bool:
    """Return True if ``torch.load`` takes ``values`` with ``weights_only=True``."""
    file = io.BytesIO()
    try:
        torch.save(values, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # noqa: BLE001 - whatever forbids it
        return False
    return True


@contextmanager
def _watched(trainer: Any, root: str, job: FrameworkJob, model: Any) -> Iterator[None]:
    """Inside the block, have the trainer count its boundaries and find its place by ``job``."""
    loaders = importlib.import_module(f"{root}.utilities.combined_loader").CombinedLoader
    set_epoch = importlib.import_module(f"{root}.loops.fit_loop")._set_sampler_epoch
    watch, begin, epoch_loop = (
        _Watch(trainer, job, model, set_epoch),
        loaders.__iter__,
        trainer.fit_loop.epoch_loop,
    )
    advance, after = epoch_loop.advance, epoch_loop.on_advance_end
    epoch_loop.advance = functools.partial(watch.advance, advance)
    epoch_loop.on_advance_end = functools.partial(watch.after_batch, after)

    def __iter__(self: Any) -> Any:
        return watch.begin(begin, self) if self is trainer.fit_loop._combined_loader else begin(self)

    loaders.__iter__ = __iter__
    try:
        yield
    finally:
        job.finish()
        loaders.__iter__ = begin
        del epoch_loop.advance, epoch_loop.on_advance_end


class _Watch:
    """What is noted while a trainer trains."""

    def __init__(self, trainer: Any, job: FrameworkJob, model: Any, set_epoch: Any) -> None:
        self._trainer, self._job, self._model, self._set_epoch = trainer, job, model, set_epoch
        self._resumes = job.checkpoint is not None
        self._began: dict[str, object] | None = None

    def begin(self, original: Any, loader: Any) -> Any:
        """Begin a pass over the training data, in a restarted process the one that was going on."""
        if not self._resumes or self._job.checkpoint is None:
            self._job.begin_pass(loader)
            return original(loader)
        self._resumes = False
        for one in loader.flattened:
            self._set_epoch(one, self._trainer.fit_loop.epoch_progress.current.processed)
        self._job.restart_pass(loader)
        iterator = original(loader)
        done = int((self._job.checkpoint / _BATCHES).read_text())
        self._job.fetch_again(loader, iterator, done, 0)
        return iterator

    def advance(self, original: Any, *words: Any) -> None:
        """Train on one batch. Before the first one, set what the hooks before it have changed."""
        if self._job.checkpoint is not None:
            with self._without_log():
                self._job.arrive(self._trainer.fit_loop._combined_loader)
        if self._began is None:
            self._began = unsaved_state(self._model)
        original(*words)

    def after_batch(self, original: Any, fetcher: Any) -> None:
        """Do what follows a batch, then count a boundary if a step has ended."""
        loop = self._trainer.fit_loop.epoch_loop
        validates = loop._should_check_val_fx(fetcher)
        original(fetcher)
        self._job.end_step()
        if found := self._found():
            self._job.refusal = found
        ends = loop.batch_progress.is_last_batch or self._trainer.should_stop
        if not (loop._should_accumulate() or validates or ends):
            with self._without_log():
                self._job.pass_safe_point()

    @contextmanager
    def _without_log(self) -> Iterator[None]:
        """Inside the block, take from the callbacks the methods of the model that Lightning gives them."""
        given = [(vars(one), name) for one in _callbacks(self._trainer) for name in ("log", "log_dict")]
        taken = [(its, name, its.pop(name)) for its, name in given if name in its]
        try:
            yield
        finally:
            for its, name, method in taken:
                its[name] = method

    def _found(self) -> str:
        """Return why the training can be restarted no more; empty if it can."""
        trainer, loaders = self._trainer, self._trainer.fit_loop._combined_loader.flattened
        means = [one.meta.name for one in trainer.fit_loop.epoch_loop._results.values() if one.meta.on_epoch]
        counts = {name: getattr(one, "_update_count", 0) for name, one in self._model.named_modules()}
        metrics = [name for name, count in counts.items() if isinstance(count, int) and count]
        if means:
            return f"it logs {means[0]} with on_epoch=True, whose mean so far is in no checkpoint"
        if metrics:
            return f"the metric {metrics[0]} of the model has been updated, which is in no checkpoint"
        if any(getattr(one, "persistent_workers", False) for one in loaders):
            return "a loader of the training data has persistent_workers"
        if math.isinf(trainer.num_training_batches):
            return "its training data has no length"
        return changed(self._began or {}, unsaved_state(self._model))


def _save(trainer: Any, directory: Path) -> None:
    """Have the trainer write its checkpoint, and note how many batches of the pass are done."""
    trainer.save_checkpoint(directory / _FILE, weights_only=False)
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    (directory / _BATCHES).write_text(str(done))
