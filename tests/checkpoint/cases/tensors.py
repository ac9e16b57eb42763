"""Tensors of every kind: ties, views, strides, dtypes, layouts, memory of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .registry import BOUNDARIES, CASES, Loop, case, loss_of, mlp


@case
def tied_weights() -> Loop:
    embedding, head = torch.nn.Embedding(100, 32), torch.nn.Linear(32, 100, bias=False)
    head.weight = embedding.weight
    optimizer = torch.optim.AdamW(embedding.parameters())
    for _ in range(BOUNDARIES):
        optimizer.zero_grad()
        loss = head(embedding(torch.randint(0, 100, (16,)))).square().mean()
        loss.backward()
        optimizer.step()
        assert head.weight.data_ptr() == embedding.weight.data_ptr()
        yield loss, embedding, head, optimizer


@case
def views_of_one_storage() -> Loop:
    flat = torch.randn(1000)
    views = [flat[:100], flat[50:150], flat.view(10, 100).t(), flat[::7], flat.as_strided((5, 5), (1, 3), 2)]
    for _ in range(BOUNDARIES):
        views[1].add_(1)
        views[2][3].mul_(0.5)
        yield flat, views


@case
def flat_parameters() -> Loop:
    """Parameters that are views of one buffer, as fused optimizers and FSDP make them."""
    flat = torch.randn(32 * 8 + 8)
    layer = torch.nn.Linear(32, 8)
    layer.weight.data = flat[: 32 * 8].view(8, 32)
    layer.bias.data = flat[32 * 8 :]
    for _ in range(BOUNDARIES):
        layer.zero_grad()
        loss = layer(torch.randn(4, 32)).square().mean()
        loss.backward()
        flat -= 0.1 * torch.cat([p.grad.flatten() for p in layer.parameters() if p.grad is not None])
        yield loss, flat, layer


@case
def strides_and_sizes() -> Loop:
    tensors = {
        "transposed": torch.randn(30, 40).t(),
        "channels_last": torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
        "expanded": torch.randn(1).expand(10, 10),
        "rows_expanded": torch.randn(5, 1).expand(5, 7),
        "zero_size": torch.empty(0, 5),
        "scalar": torch.randn(()),
        "overlapping": torch.randn(10).unfold(0, 4, 1),
        "large": torch.randn(700, 700),
    }
    for _ in range(BOUNDARIES):
        tensors["transposed"] += tensors["expanded"][0, 0]
        tensors["scalar"] += tensors["overlapping"].sum()
        tensors["large"] @= tensors["large"] / 700
        yield (tensors,)


_DTYPES = [
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64",
    "complex32 complex64 complex128",
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2",
]


@case
def dtypes() -> Loop:
    """Random bits of every dtype, NaNs included, changed as bits."""
    names = [name for names in _DTYPES for name in names.split() if hasattr(torch, name)]
    bits = {
        name: torch.randint(0, 2 if name == "bool" else 256, (4096,), dtype=torch.uint8) for name in names
    }
    tensors = {name: raw.view(getattr(torch, name)) for name, raw in bits.items()}
    for _ in range(BOUNDARIES):
        for raw in bits.values():
            raw.bitwise_xor_(1)
        yield bits, tensors


_QUANTIZED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tensor": lambda x: torch.quantize_per_tensor(x, 0.1, 3, torch.quint8),
    "channel": lambda x: torch.quantize_per_channel(
        x, torch.rand(64) + 0.1, torch.zeros(64, dtype=torch.long), 0, torch.qint8
    ),
}


@case
def quantized() -> Loop:
    tensors = {name: make(torch.randn(64, 64)) for name, make in _QUANTIZED.items()}
    for _ in range(BOUNDARIES):
        values = {name: tensor.dequantize() for name, tensor in tensors.items()}
        tensors = {name: make(values[name] + torch.randn(64, 64)) for name, make in _QUANTIZED.items()}
        yield tensors, values, tensors["channel"].q_per_channel_scales()


def _sparse(layout: torch.layout) -> Loop:
    options: dict[str, Any] = {"layout": layout}
    if layout in (torch.sparse_bsr, torch.sparse_bsc):
        options["blocksize"] = (4, 4)
    matrix = (torch.randn(64, 64) > 1).float().to_sparse(**options)
    dense = torch.randn(64, 64)
    for _ in range(BOUNDARIES):
        dense = torch.tanh(matrix.to_dense() @ dense + torch.randn(64, 64))
        matrix = (matrix.to_dense() * dense).to_sparse(**options)
        yield matrix, dense


def _register() -> None:
    for name in ("coo", "csr", "csc", "bsr", "bsc"):
        layout = getattr(torch, f"sparse_{name}")
        CASES[f"sparse-{name}"] = lambda layout=layout: _sparse(layout)


_register()


@case
def sparse_gradients() -> Loop:
    table = torch.nn.EmbeddingBag(500, 8, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    for _ in range(BOUNDARIES):
        optimizer.zero_grad()
        # No row twice: a GPU adds up what falls on the same row in any order.
        loss = table(torch.randperm(500)[:40].view(4, 10)).square().sum()
        loss.backward()
        optimizer.step()
        yield loss, table, optimizer, [parameter.grad for parameter in table.parameters()]


@case
def nested() -> Loop:
    rows = torch.nested.nested_tensor([torch.randn(n, 8) for n in (3, 5, 2)], layout=torch.jagged)
    for _ in range(BOUNDARIES):
        rows = rows * 2 + 1
        yield rows.values(), rows.offsets()


@case
def bare_storages() -> Loop:
    untyped = torch.randn(5000).untyped_storage()
    typed = torch.storage.TypedStorage(
        wrap_storage=torch.randn(10).untyped_storage(), dtype=torch.float32, _internal=True
    )
    for number in range(BOUNDARIES):
        untyped[17] = number
        yield untyped, typed._untyped_storage


@case
def memory_of_numpy() -> Loop:
    array = np.random.default_rng(5).random(200_000)
    tensor, small = torch.from_numpy(array), torch.from_numpy(np.arange(9))
    exported = torch.randn(50_000)
    seen = exported.numpy()
    for _ in range(BOUNDARIES):
        tensor.mul_(1.5)
        array += 1
        exported.add_(torch.randn(50_000))
        yield array, tensor, small, exported, seen


@case
def memory_given_to_others() -> Loop:
    """Others know the address, though the tensor could be resized."""
    given, tensor = torch.randn(50_000), torch.randn(50_000)
    array, twin = np.from_dlpack(given), torch.from_dlpack(tensor)
    for _ in range(BOUNDARIES):
        given.add_(1)
        twin.mul_(2)
        assert array.ctypes.data == given.data_ptr()
        assert twin.data_ptr() == tensor.data_ptr()
        yield given, array, tensor, twin


@case
def shared_memory() -> Loop:
    shared, counter = torch.randn(10_000).share_memory_(), torch.zeros(1).share_memory_()
    for _ in range(BOUNDARIES):
        shared.add_(torch.randn(10_000))
        counter += 1
        yield shared, counter


@case
def weights_under_parametrization() -> Loop:
    model = mlp()
    torch.nn.utils.parametrizations.spectral_norm(model[0])
    torch.nn.utils.parametrizations.weight_norm(model[4])
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(BOUNDARIES):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        yield loss, model, optimizer
