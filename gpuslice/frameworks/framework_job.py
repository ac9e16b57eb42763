"""An attached job whose state is the checkpoint that a framework's trainer writes itself.

The trainer writes its files into a directory of the RAM disk. Their bytes become the named state of a
snapshot: so they are checksummed, published whole, moved and thrown away like the state of
``gpuslice.attach``. A restarted process writes the files again, and the trainer loads them by its own means.

Trainers do not go on exactly by themselves: the batches that are skipped would have drawn random numbers. So
the pass over the training data that was going on is begun again, with the random states of its beginning, and
the batches that are done are fetched once more. A trainer fetches a batch ahead, between two steps. So the
batches of the last step are fetched with the random states of the end of the step before. Then all random
states become those of the snapshot.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpuslice.checkpoint.attributes.job_attributes import JobAttributes
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.named import process_rng
from gpuslice.checkpoint.named.generators import (
    Generator,
    generator_state,
    own_generators,
    set_generator_state,
)
from gpuslice.checkpoint.named.state import OWN_PREFIX, check
from gpuslice.errors import RefusedSnapshotError
from gpuslice.frameworks.adapters import why_not
from gpuslice.runtime import trainings
from gpuslice.runtime.current import runtime
from gpuslice.runtime.ending import deliver, say
from gpuslice.runtime.runtime import Runtime
from gpuslice.training import identity
from gpuslice.types import DeviceName

_FILES, _DRAWN, _WRITER = "files", "random states", "written by"
_RNG = f"{OWN_PREFIX}rng"
#: How many boundaries a suspend that another process is to go on from waits for a good one, at most.
_PATIENCE = 64
_DIRECTORY = "checkpoint-of-"


def process_to_restart(package: str, given: str) -> Runtime | None:
    """Return this process if a trainer of ``package`` is to restart its training. Else say why, if need be.

    ``given`` is what the script has the trainer resume from. A process whose job has no name, or whose script
    has attached its own state, needs no trainer for it.
    """
    process = runtime()
    if not process.settings.job or not isinstance(process.attached, FrameworkJob | None):
        return None
    if reason := why_not(package, given):
        say(f"job {process.settings.job}: gpuslice does not restart this Trainer: {reason}")
        return None
    return process


class FrameworkJob:
    """The state of a trainer's training (``training.attached.Attached``).

    Parameters
    ----------
    process
        The process that trains.
    writer
        The framework and its version.
    save
        Has the trainer write its checkpoint into a directory.
    kept
        Objects of the script whose attributes are kept, too: callbacks, the data set under ``data``.

    Attributes
    ----------
    checkpoint
        The directory with the files that the trainer goes on from; None if the training begins.
    refusal
        Why no other process can go on from this training; empty if nothing forbids it.
    """

    replicated = False
    samples = 0

    def __init__(
        self, process: Runtime, writer: str, save: Callable[[Path], None], kept: Mapping[str, object]
    ) -> None:
        self.checkpoint: Path | None = None
        self.refusal = ""
        self._process = process
        self._writer = writer
        self._save = save
        self._data = kept.get("data")
        self._attributes = JobAttributes(lambda: kept)
        self._training = process.next_training()
        self._loader: object = None
        self._pass: dict[str, Any] | None = None
        self._drawn: dict[str, Any] = {}
        #: The random states at the end of the newest step of the pass; None before that.
        self._before: dict[str, Any] | None = None
        self._at_safe_point = self._ended = False
        self._asked_at = 0
        self._reached: Callable[[], None] = _nothing
        self._told = ""

    def attach(self, device: torch.device) -> None:
        """Make this the process's job. If the named job has a snapshot of it, go on from that."""
        process = self._process
        if device.type == "cuda" and not process.suspension.in_use.known:
            process.suspension.in_use.move_in(DeviceName("cuda", device.index or 0))
        _remove_those_of_dead_processes(process.storage.ramdisk.directory)
        trainings.name_job(process, None)
        trainings.go_on(process, self._training, self._go_on_from)
        process.attached = self
        process.attachments += 1

    # What the runtime asks.

    @property
    def interruptible(self) -> bool:
        """True unless another process is to go on and a boundary that allows it will come soon."""
        if not self._process.for_restart or self._at_safe_point or not self.restartable_later:
            self._asked_at = 0
            return True
        boundary = self._process.boundaries.count
        self._asked_at = self._asked_at or boundary
        return boundary - self._asked_at > _PATIENCE

    def restartable(self, *, explicit: bool) -> bool:
        """Return True if another process is to go on from here, and can. Saving takes long otherwise."""
        if not self._wanted:
            return False
        return trainings.can_be_saved(self._process, self._attributes)

    @property
    def obstacle(self) -> str:
        """Why no other process could go on."""
        return self.refusal or self._attributes.obstacle

    @property
    def restartable_later(self) -> bool:
        """True if another process could go on from the trainer's next step."""
        return not self._ended and not self.obstacle

    def end(self, cause: str) -> None:
        """Note that another training has replaced this one."""
        self._ended = True

    def named_state(self) -> dict[str, object]:
        """Have the trainer save, and return its files by path, and what it does not save itself."""
        if not self._wanted:
            return {}
        with tempfile.TemporaryDirectory(dir=self._directory, prefix=_prefix()) as name:
            self._save(Path(name))
            files = {str(path.relative_to(name)): _content(path) for path in _files(Path(name))}
        drawn = {**self._drawn, "pass": self._pass, "steps": self._process.boundaries.steps}
        return {
            _FILES: files,
            _DRAWN: drawn,
            _WRITER: self._writer,
            **self._attributes.state(),
            _RNG: self._drawn["process"],
            identity.NAME: self._training.text(),
        }

    @property
    def _wanted(self) -> bool:
        """True if the trainer can save here, and another process is to go on."""
        return self._at_safe_point and (self._process.for_restart or self._process.checkpointing)

    # What an adapter calls.

    def end_step(self) -> None:
        """Note the random states at the end of a step, and of the step before in the same pass."""
        self._drawn = {**self._now(), "before": self._before}
        self._before = self._now()

    def pass_safe_point(self) -> None:
        """Count a boundary at the end of a step, after `end_step`. A restart begins here."""
        boundaries = self._process.boundaries
        if self._ended or not boundaries.thread.trains():
            return
        if self.refusal != self._told:
            self._told = self.refusal
            say(f"job {self._process.settings.job} cannot be restarted: {self.refusal}")
        self._at_safe_point = not self.refusal
        try:
            late = boundaries.pass_another()
        finally:
            self._at_safe_point = False
        deliver(late)

    def begin_pass(self, loader: object) -> None:
        """Note that the trainer is about to begin a pass over the training data of ``loader``."""
        self._loader, self._before = loader, None
        self._pass = self._now()
        self._attributes.begin_pass(self._data)

    def replay(self, loader: Iterable[Any], batches: int, of_last_step: int) -> Iterator[Any]:
        """Begin the pass that was going on again, and yield its batches after the first ``batches``.

        The last step was made with ``of_last_step`` of these.
        """
        self.restart_pass(loader)
        iterator = iter(loader)
        self.fetch_again(loader, iterator, batches, of_last_step)
        self.arrive(loader)
        yield from iterator

    def restart_pass(self, loader: object) -> None:
        """Set what the training data depends on to what it was when the pass began."""
        assert self._pass is not None
        _restore(loader, self._pass)
        self._attributes.restart_pass(self._data)
        self._attributes.begin_pass(self._data)

    def fetch_again(self, loader: object, iterator: Iterator[Any], batches: int, of_last_step: int) -> None:
        """Fetch the batches that are done, with the random states that they were fetched with."""
        with self._process.boundaries.skipping():
            for number in range(batches):
                if number == batches - of_last_step and self._drawn["before"] is not None:
                    _restore(loader, self._drawn["before"])
                next(iterator, None)

    def arrive(self, loader: object) -> None:
        """Give the random states and the kept objects what they had when the snapshot was taken."""
        if self.checkpoint is not None:
            self._loader = loader
            reached, self._reached = self._reached, _nothing
            reached()
            _restore(loader, self._drawn)
            self._before = self._now()
            shutil.rmtree(self.checkpoint, ignore_errors=True)
            self.checkpoint = None

    def finish(self) -> None:
        """Note that the trainer has ended. The newest snapshot stays until the script ends, too."""
        self._ended = True
        if self.checkpoint is not None:
            shutil.rmtree(self.checkpoint, ignore_errors=True)

    def _now(self) -> dict[str, Any]:
        """Return the present random states of the process and of the training data."""
        return {"process": process_rng.capture(), "own": _states(self._loader)}

    @property
    def _directory(self) -> Path:
        return self._process.storage.ramdisk.directory

    def _go_on_from(self, snapshot: SnapshotFile) -> None:
        process, verify = self._process, self._process.settings.verify
        look = partial(self._check, snapshot)
        restoration = look(verify=verify)
        drawn = restoration.value(_DRAWN)
        for states in filter(None, (drawn, drawn["pass"], drawn["before"])):
            process_rng.check(states["process"], {})
        loaded = restoration.apply()
        if loaded[_WRITER] != self._writer:
            raise RefusedSnapshotError(
                f"job {process.settings.job} has a snapshot by {loaded[_WRITER]}, and this is {self._writer}",
                "install the former version, or begin anew with --fresh",
            )
        self._pass, self._drawn = drawn.pop("pass"), drawn
        self.checkpoint = Path(tempfile.mkdtemp(dir=self._directory, prefix=_prefix()))
        for name, content in loaded[_FILES].items():
            _write(self.checkpoint, name, content)
        boundaries = process.boundaries
        boundaries.count = boundaries.went_on_from = snapshot.boundary
        boundaries.steps = int(drawn.pop("steps"))
        self._attributes.head_for(lambda named: check(snapshot, named, verify=verify))

        def reached() -> None:
            look(verify=False).apply()
            self._attributes.reached()
            snapshot.close()

        self._reached = reached

    def _check(self, snapshot: SnapshotFile, *, verify: bool) -> Any:
        plain = dict.fromkeys((_FILES, _DRAWN, _WRITER))
        live = {**plain, **self._attributes.entries()}
        return check(snapshot, live, entire=True, loose=tuple(plain), verify=verify)


def _states(loader: object) -> list[Any]:
    return [generator_state(item)[1] for item in _generators(loader)]


def _generators(loader: Any) -> list[Generator]:
    """Return the generators of a loader but those that its sampler seeds anew for each pass.

    Accelerate's ``SeedableRandomSampler`` makes such a generator in the first pass.
    """
    samplers, sampler = [], getattr(loader, "batch_sampler", None)
    while sampler is not None and sampler not in samplers:
        samplers.append(sampler)
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    seeded = [one.generator for one in samplers if hasattr(one, "initial_seed")]
    return [one for one in own_generators(loader) if not any(one is other for other in seeded)]


def _restore(loader: object, states: Mapping[str, Any]) -> None:
    """Set the process's random generators and those of ``loader``."""
    generators = _generators(loader)
    if len(generators) != len(states["own"]):
        raise RefusedSnapshotError(
            f"the training data draws from {len(generators)} random generators, but {len(states['own'])} "
            "were saved",
            "restart the script that wrote the snapshot, or begin anew with --fresh",
        )
    for generator, state in zip(generators, states["own"], strict=True):
        set_generator_state(generator, state)
    process_rng.restore(states["process"])


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _content(path: Path) -> torch.Tensor:
    """Return the bytes of a file as a tensor."""
    content = torch.empty(path.stat().st_size, dtype=torch.uint8)
    with path.open("rb") as file:
        file.readinto(content.numpy().data)
    return content


def _write(directory: Path, name: str, content: torch.Tensor) -> None:
    path = directory / name
    if not path.resolve().is_relative_to(directory.resolve()):
        raise RefusedSnapshotError(f"the snapshot has a file outside of its directory: {name!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.numpy().data)


def _prefix() -> str:
    return f"{_DIRECTORY}{os.getpid()}-"


def _remove_those_of_dead_processes(directory: Path) -> None:
    """Remove the directories that processes which were killed have left."""
    for path in directory.glob(f"{_DIRECTORY}*"):
        pid = path.name.removeprefix(_DIRECTORY).partition("-")[0]
        if not pid.isdecimal() or not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)


def _nothing() -> None:
    """Do nothing: there is no snapshot to arrive at."""
