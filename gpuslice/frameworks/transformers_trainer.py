"""Restarts ``Trainer`` of transformers by its own checkpoints.

``Trainer.train`` gets the newest checkpoint of the job. It counts a boundary after each optimizer step, when
what follows the step (log, evaluation, a checkpoint of the script) is done, and after each epoch. There is
none at the last step of an epoch: a resumed ``Trainer`` would leave out the end of the epoch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpuslice.frameworks.adapters import version_of
from gpuslice.frameworks.framework_job import FrameworkJob, process_to_restart
from gpuslice.frameworks.unsaved import changed, plain_values, unsaved_state

#: What a checkpoint of ours must not do: the script's own options for its checkpoints.
_NEUTRAL = {"save_only_model": False, "push_to_hub": False, "save_total_limit": None}
#: Attributes of ``Trainer`` that change while it trains, and are saved or made anew.
_OWN = {"trainer.current_flos", "trainer.current_gradient_accumulation_steps", "trainer.is_in_train"}


def install(module: Any, package: str) -> None:
    """Have ``Trainer.train`` in ``module`` go on from the job's newest snapshot."""
    trainer, train = module.Trainer, module.Trainer.train

    @functools.wraps(train)
    def with_restarts(self: Any, resume_from_checkpoint: Any = None, *words: Any, **named: Any) -> Any:
        job = _job(self, module, package, resume_from_checkpoint, words, named)
        if job is None:
            return train(self, resume_from_checkpoint, *words, **named)
        with _watched(self, module, job):
            return train(self, None if job.checkpoint is None else str(job.checkpoint), *words, **named)

    trainer.train = with_restarts


def _job(
    trainer: Any, module: Any, package: str, given: Any, words: tuple[Any, ...], named: dict[str, Any]
) -> FrameworkJob | None:
    """Attach the trainer's training and return it. Return None, and say why, if that is not possible."""
    process = process_to_restart(package, f"resume_from_checkpoint={given!r}" if given else "")
    if process is None:
        return None
    writer = f"{package} {version_of(package)}"
    trainings_kept = {f"callback {type(one).__name__} {n}": one for n, one in enumerate(_callbacks(trainer))}
    kept = {**trainings_kept, "data": [trainer.train_dataset, trainer.data_collator]}
    job = FrameworkJob(process, writer, functools.partial(_save, trainer), kept)
    job.refusal = _refusal(trainer, [*words, *named.values()])
    job.attach(trainer.args.device)
    return job


def _callbacks(trainer: Any) -> list[Any]:
    """Return the callbacks whose attributes are kept: the script's, and those that stop early."""
    return [
        one
        for one in trainer.callback_handler.callbacks
        if not type(one).__module__.startswith("transformers.")
        or type(one).__name__ == "EarlyStoppingCallback"
    ]


def _refusal(trainer: Any, trial: list[Any]) -> str:
    """Return why this trainer's own resume is not exact; empty if it is."""
    args, data = trainer.args, trainer.train_dataset
    reasons = {
        "it has several ranks or GPUs": args.world_size > 1 or args.n_gpu > 1,
        "it trains by DeepSpeed or FSDP": trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled,
        "it searches hyper-parameters": any(one is not None for one in trial),
        "auto_find_batch_size is set": args.auto_find_batch_size,
        "ignore_data_skip is set": args.ignore_data_skip,
        "eval_on_start is set": getattr(args, "eval_on_start", False),
        "dataloader_persistent_workers is set": args.dataloader_persistent_workers,
        "its data set has no length": not hasattr(data, "__len__"),
    }
    return next((reason for reason, found in reasons.items() if found), "")


@contextmanager
def _watched(trainer: Any, module: Any, job: FrameworkJob) -> Iterator[None]:
    """Inside the block, have the trainer count its boundaries and find its place by ``job``."""
    watch = _Watch(trainer, module, job)
    callback = _callback(module, watch)
    trainer.add_callback(callback)
    skip, again = module.skip_first_batches, trainer.args.restore_callback_states_from_checkpoint
    after, load_rng = trainer._maybe_log_save_evaluate, trainer._load_rng_state
    module.skip_first_batches = watch.skip
    trainer.args.restore_callback_states_from_checkpoint = False  # their attributes are kept by us
    trainer._maybe_log_save_evaluate = functools.partial(watch.after_step, after)
    trainer._load_rng_state = functools.partial(watch.load_random_states, load_rng)
    try:
        yield
    finally:
        job.finish()
        module.skip_first_batches = skip
        trainer.args.restore_callback_states_from_checkpoint = again
        del trainer._maybe_log_save_evaluate, trainer._load_rng_state
        trainer.remove_callback(callback)


class _Watch:
    """What is noted while a trainer trains."""

    def __init__(self, trainer: Any, module: Any, job: FrameworkJob) -> None:
        self._trainer, self._module, self._job = trainer, module, job
        self._at_epoch_end = False
        self._resumes = job.checkpoint is not None
        self._began = self._look()

    def begin_epoch(self) -> None:
        """Note the random states before the first batch of an epoch."""
        self._at_epoch_end = False
        if not self._resumes:
            self._job.begin_pass(self._loader)

    def end_epoch(self) -> None:
        """Note that what follows is the end of an epoch."""
        self._at_epoch_end = True

    def after_step(self, original: Any, *words: Any, **named: Any) -> None:
        """Do what follows a step, then count a boundary."""
        original(*words, **named)
        self._job.end_step()
        control, state = self._trainer.control, self._trainer.state
        if control.should_epoch_stop:
            self._job.refusal = "a callback has ended an epoch early"
        if found := changed(self._began, self._look()):
            self._job.refusal = found
        last_of_epoch = state.epoch is not None and state.epoch == int(state.epoch)
        if not control.should_training_stop and (self._at_epoch_end or not last_of_epoch):
            self._job.pass_safe_point()

    def skip(self, loader: Any, batches: int = 0) -> Any:
        """Return a loader that goes on after the first ``batches`` of the pass that was going on."""
        return _Rest(self, loader, batches)

    def rest(self, loader: Any, batches: int) -> Iterator[Any]:
        """Yield the batches after the first ``batches``."""
        self._resumes = False
        return self._job.replay(loader, batches, self._trainer.args.gradient_accumulation_steps)

    def load_random_states(self, original: Any, checkpoint: Any) -> None:
        """Set the random states at the beginning of an epoch. Amid one, `rest` does it."""
        if self._resumes:
            self._resumes = False
            self._job.arrive(self._loader)
            self._job.begin_pass(self._loader)

    @property
    def _loader(self) -> Any:
        return self._trainer.callback_handler.train_dataloader

    def _look(self) -> dict[str, object]:
        """Return what must not change, because no checkpoint has it, by name."""
        found = unsaved_state(self._trainer.model)
        if not type(self._trainer).__module__.startswith("transformers."):
            found |= {k: v for k, v in plain_values({"trainer": self._trainer}).items() if k not in _OWN}
        return found


class _Rest:
    """The loader of a pass that was going on, without the batches that are done."""

    def __init__(self, watch: _Watch, loader: Any, batches: int) -> None:
        self._watch, self._loader, self._batches = watch, loader, batches

    def __iter__(self) -> Iterator[Any]:
        return self._watch.rest(self._loader, self._batches)

    def __len__(self) -> int:
        return len(self._loader) - self._batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _callback(module: Any, watch: _Watch) -> Any:
    """Return a ``TrainerCallback`` that tells ``watch`` of epochs."""

    def on_epoch_begin(self: Any, *words: Any, **named: Any) -> None:
        watch.begin_epoch()

    def on_epoch_end(self: Any, *words: Any, **named: Any) -> None:
        watch.end_epoch()

    events = {"on_epoch_begin": on_epoch_begin, "on_epoch_end": on_epoch_end}
    return type("GpusliceCallback", (module.TrainerCallback,), events)()


def _save(trainer: Any, directory: Path) -> None:
    """Have the trainer write its checkpoint into ``directory``, and leave its own checkpoints as they are."""
    args, callbacks = trainer.args, copy.deepcopy(trainer.state.stateful_callbacks)
    changed = {**_NEUTRAL, "output_dir": str(directory)}
    before = {name: getattr(args, name) for name in changed}
    try:
        vars(args).update(changed)
        trainer._save_checkpoint(trainer.model, None)
    finally:
        vars(args).update(before)
        trainer.state.stateful_callbacks = callbacks
    (written,) = directory.iterdir()
    for path in list(written.iterdir()):
        path.rename(directory / path.name)
    written.rmdir()
