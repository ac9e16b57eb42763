"""torch's own machinery around a training: compiled modules, DDP, checkpointed activations, functorch."""

from __future__ import annotations

import shutil

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from .registry import BOUNDARIES, CASES, Loop, case, loss_of, mlp


def _compiled(backend: str, **options: int) -> Loop:
    torch._dynamo.reset()
    model = mlp(dropout=backend != "inductor")
    compiled = torch.compile(model, backend=backend, options=options or None)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(BOUNDARIES):
        optimizer.zero_grad()
        loss = loss_of(compiled)  # type: ignore[arg-type]
        loss.backward()
        optimizer.step()
        yield loss, model, optimizer
    torch._dynamo.reset()


CASES["compiled-eager"] = lambda: _compiled("eager")
CASES["compiled-aot_eager"] = lambda: _compiled("aot_eager")
if shutil.which("g++"):
    # Inductor would start as many compiling processes as there are cores, and each of them imports torch.
    CASES["compiled-inductor"] = lambda: _compiled("inductor", compile_threads=1)


def _ddp(*, views: bool) -> Loop:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = mlp()
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=views)
        optimizer = torch.optim.AdamW(parallel.parameters())
        for number in range(BOUNDARIES + 2):
            optimizer.zero_grad(set_to_none=bool(number % 2))
            loss = loss_of(parallel)
            loss.backward()
            yield loss, model, optimizer
            optimizer.step()
            yield loss, model, optimizer
        del parallel
    finally:
        dist.destroy_process_group()


CASES["ddp-bucket_views"] = lambda: _ddp(views=True)
CASES["ddp-copied_buckets"] = lambda: _ddp(views=False)


@case
def sharded_parameters() -> Loop:
    """FSDP2: parameters and moments are DTensors, whose memory is an inner tensor's."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(BOUNDARIES):
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            yield loss, [p.to_local() for p in model.parameters()], optimizer  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()


@case
def activation_checkpointing() -> Loop:
    model = mlp(dropout=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(BOUNDARIES):
        hidden = checkpoint(model[:4], torch.randn(16, 32, requires_grad=True), use_reentrant=False)
        loss = model[4](hidden).square().mean()
        yield loss, model, optimizer
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, model, optimizer


@case
def functional_ensemble() -> Loop:
    models = [torch.nn.Linear(32, 4) for _ in range(3)]
    parameters, _ = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    weights = {name: parameter.detach() for name, parameter in parameters.items()}

    def loss_for(weights: dict[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.func.functional_call(models[0], weights, (inputs,))
        return output.square().mean()

    for _ in range(BOUNDARIES):
        slopes = torch.vmap(torch.func.grad(loss_for), in_dims=(0, None))(weights, torch.randn(8, 32))
        weights = {name: weight - 0.1 * slopes[name] for name, weight in weights.items()}
        yield weights, slopes


@case
def transformer() -> Loop:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(BOUNDARIES):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 10, 32)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss, model, optimizer
