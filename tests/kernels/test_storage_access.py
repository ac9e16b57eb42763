"""Storages that refuse to be touched: in every thread, by torch's own error, as long as asked."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable

import pytest
import torch

from gpuslice.kernels import storage_access
from gpuslice.kernels.storage_access import REFUSAL, forbid, permit

SQUARE = 64
TOUCHES: dict[str, Callable[[torch.Tensor], object]] = {
    "address": lambda t: t.data_ptr(),
    "clone": lambda t: t.clone(),
    "copy from": lambda t: torch.empty(SQUARE, SQUARE).copy_(t),
    "copy to": lambda t: t.copy_(torch.ones(SQUARE, SQUARE)),
    "fill": lambda t: t.fill_(0),
    "foreach": lambda t: torch._foreach_add_([t], 1.0),
    "item": lambda t: t[0, 0].item(),
    "numpy": lambda t: t.numpy(),
    "print": str,
    "product": lambda t: t @ t,
    "save": lambda t: torch.save(t, io.BytesIO()),
    "share": lambda t: t.share_memory_(),
    "stack": lambda t: torch.stack([t, t]),
    "sum": lambda t: t.sum(),
    "tolist": lambda t: t.tolist(),
    "view": lambda t: t.view(-1)[3:].sum(),
}


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
@pytest.mark.parametrize("emptied", [False, True])
def test_touching_a_forbidden_storage_is_an_error(
    touch: Callable[[torch.Tensor], object], emptied: bool
) -> None:
    tensor = torch.ones(SQUARE, SQUARE)
    storage, nbytes = tensor.untyped_storage(), tensor.nbytes
    if emptied:
        storage.resize_(0)
    forbid([storage])
    with pytest.raises(RuntimeError):
        touch(tensor)
    assert (tensor.shape, tensor.dtype) == ((SQUARE, SQUARE), torch.float32)
    permit([storage])
    storage.resize_(nbytes)
    tensor.fill_(3)
    assert tensor.mean() == 3


def test_backward_over_a_forbidden_storage_is_an_error() -> None:
    tensor = torch.full((8,), 2.0, requires_grad=True)
    loss = (tensor.tanh() * tensor).sum()
    forbid([tensor.untyped_storage()])
    # Where a job has been suspended before in this process, its hooks give the error their own words.
    with pytest.raises(RuntimeError, match=f"{REFUSAL}|its memory is away"):
        loss.backward(retain_graph=True)
    permit([tensor.untyped_storage()])
    loss.backward()
    assert tensor.grad is not None


def test_it_holds_in_other_threads() -> None:
    tensor, said = torch.ones(8), list[str]()

    def touch() -> None:
        try:
            tensor.sum()
        except RuntimeError as error:
            said.append(str(error))

    forbid([tensor.untyped_storage()])
    thread = threading.Thread(target=touch)
    thread.start()
    thread.join()
    permit([tensor.untyped_storage()])
    assert REFUSAL in said[0]


def test_what_was_never_forbidden_may_be_permitted() -> None:
    tensor = torch.ones(8)
    permit([tensor.untyped_storage()])
    assert tensor.sum() == 8


def test_a_torch_with_other_flags_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage_access.supported()
    find = storage_access._flags.__wrapped__
    monkeypatch.setattr(torch._C, "_set_throw_on_mutable_data_ptr", lambda tensor: None)
    assert find() is None
    monkeypatch.setattr(storage_access, "_flags", lambda: None)
    tensor = torch.ones(8)
    forbid([tensor.untyped_storage()])
    assert tensor.sum() == 8
    permit([tensor.untyped_storage()])
    assert not storage_access.supported()
