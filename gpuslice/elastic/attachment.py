"""``gpuslice.elastic.attach``: check what is attached, and return the world."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gpuslice.checkpoint.named.state import OWN_PREFIX, describe
from gpuslice.errors import UsageError
from gpuslice.runtime import trainings
from gpuslice.runtime.current import runtime
from gpuslice.types import DeviceName

from . import group
from .batches import scale_rates
from .sampler import ElasticSampler
from .world import World

if TYPE_CHECKING:
    from .sharded import Build


def attach(
    job: str | None = None,
    /,
    *,
    ranks: int | None = None,
    backend: str | None = None,
    build: Build | None = None,
    **named: object,
) -> World:
    """Name the state of a training whose ranks come and go, and take part in it.

    Every rank calls this when it has made its model. It returns when this rank is needed, with the
    state of rank 0; under a name, that is the newest snapshot's.

    Parameters
    ----------
    job
        The job's name, unless ``gpuslice run --job`` or the scheduler gives one.
    ranks
        How many ranks begin, without a scheduler; all that were started if not given.
    backend
        Backend of the process groups; by default ``nccl`` for modules on GPUs, else ``gloo``.
    build
        A function that makes what is divided among ranks: modules with ``fully_shard``, their optimizers and
        schedulers, by name. It is called for each number of ranks, when their process group is there; what
        it has made is ``World.built``, with the state of what was there before.
    **named
        As for ``gpuslice.attach``, and one `ElasticSampler`. The gradients of all modules are added up.
        Numbers, texts and lists belong into ``World.state``.

    Raises
    ------
    UsageError
        Naming what cannot be attached.
    SnapshotError
        If the state that is to be gone on from is damaged or does not fit the objects.
    """
    sampler = _check(named)
    process = runtime()
    if process.attached is not None:
        raise UsageError(
            "this process has attached a job already, and an elastic one cannot replace it",
            "attach everything in one call, or start another process for it",
        )
    if dist.is_initialized():
        raise UsageError(
            "there is a process group already, which cannot grow or shrink",
            "leave out init_process_group: gpuslice.elastic makes the groups",
        )
    trainings.name_job(process, job)
    world = World(process, named, sampler, backend, build)
    launched = group.width_of()
    if ranks is not None and not 1 <= ranks <= launched:
        raise UsageError(f"{ranks} ranks cannot begin: {launched} were started", "start as many")
    # Without a module on a GPU it is not known which one; the first suspend sees where the state is.
    if world._device.index is not None and not process.suspension.in_use.known:
        process.suspension.in_use.move_in(DeviceName("cuda", world._device.index))
    process.boundaries.leave_to_script()
    process.attached = world
    process.attachments += 1
    world.enter(launched if ranks is None else ranks)
    if sampler.scaling == "learning_rate":
        optimizers = [item for item in named.values() if isinstance(item, torch.optim.Optimizer)]
        scale_rates(optimizers, lambda: world.width)
    return world


def _check(named: Mapping[str, object]) -> ElasticSampler:
    """Refuse objects that cannot be attached. Return the sampler."""
    for name, item in named.items():
        if name.startswith(OWN_PREFIX):
            raise UsageError(f"the name {name!r} is gpuslice's own", "choose another one")
        if isinstance(item, torch.nn.parallel.DistributedDataParallel):
            raise UsageError(
                f"{name} is a DistributedDataParallel, which belongs to one process group",
                f"attach {name}.module, and call that: gpuslice.elastic adds the gradients up",
            )
        if isinstance(item, torch.nn.Module) and any(map(_is_shard, item.parameters())):
            raise UsageError(
                f"{name} has parameters that are divided among ranks, whose number may change",
                "have them made by a function: build=make (docs/elastic.md), or leave out fully_shard",
            )
    samplers = [item for item in named.values() if isinstance(item, ElasticSampler)]
    if len(samplers) != 1:
        raise UsageError(
            f"{len(samplers)} of the attached objects are an ElasticSampler", "attach one: sampler=sampler"
        )
    describe(named)
    return samplers[0]


def _is_shard(parameter: torch.nn.Parameter) -> bool:
    """Return True if the parameter is a ``DTensor`` or is divided among ranks in another way."""
    return hasattr(type(parameter), "__tensor_flatten__") or hasattr(parameter, "device_mesh")
