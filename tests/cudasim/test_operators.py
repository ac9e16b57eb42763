"""PyTorch's operators over the simulation: right values, in stream order, the device's random numbers."""

from __future__ import annotations

import cudasim
import pytest
import torch

CUDA = torch.device("cuda:0")


def test_results_arrive_late_and_in_order() -> None:
    """Without a wait between two streams the second one sees what was there before."""
    source = torch.zeros(1000, device=CUDA)
    torch.cuda.synchronize()
    side = torch.cuda.Stream(0)
    with cudasim.held(torch.cuda.current_stream().cuda_stream):
        source.add_(1)
        with torch.cuda.stream(side):
            unaware = source.clone()
            side.synchronize()
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.current_stream(0))
        side.wait_stream(torch.cuda.default_stream(0))
        aware = source.clone()
    torch.cuda.synchronize()
    assert (unaware.sum().item(), aware.sum().item(), source.sum().item()) == (0, 1000, 1000)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int8])
def test_conversions_and_layouts(dtype: torch.dtype) -> None:
    values = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    moved = values.to(CUDA)
    assert torch.equal(moved.permute(2, 0, 1).to(dtype).cpu(), values.permute(2, 0, 1).to(dtype))
    target = torch.empty(4, 2, 3, dtype=dtype, device=CUDA)
    target.copy_(moved.permute(2, 0, 1))
    assert torch.equal(target.cpu(), values.permute(2, 0, 1).to(dtype))


def test_random_numbers_are_those_of_the_devices_generator() -> None:
    torch.manual_seed(3)
    host_state, device_state = torch.get_rng_state(), torch.cuda.get_rng_state(0)
    first = torch.randn(5, device=CUDA), torch.nn.functional.dropout(torch.ones(50, device=CUDA))
    assert torch.equal(torch.get_rng_state(), host_state), "the host's generator is only lent"
    torch.cuda.set_rng_state(device_state, 0)
    again = torch.randn(5, device=CUDA), torch.nn.functional.dropout(torch.ones(50, device=CUDA))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], torch.randn(5, device=CUDA))
    own = torch.Generator(CUDA).manual_seed(9)
    drawn = torch.rand(4, device=CUDA, generator=own)
    assert not torch.equal(drawn, torch.rand(4, device=CUDA, generator=own))
    assert torch.equal(drawn, torch.rand(4, device=CUDA, generator=own.manual_seed(9)))


def test_devices_do_not_mix() -> None:
    here, there = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    with pytest.raises(RuntimeError, match="same device"):
        here + there
    with pytest.raises(RuntimeError, match="same device"):
        here + torch.ones(3)
    assert (here + torch.tensor(2.0)).sum().item() == 9
    assert (here + there.to("cuda:0")).sum().item() == 6


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_networks_learn_as_on_the_host(kind: str) -> None:
    torch.manual_seed(0)
    network = getattr(torch.nn, kind)(5, 7, num_layers=2)
    inputs = torch.randn(4, 3, 5)
    network(inputs)[0].square().sum().backward()
    expected = [parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None]
    network.zero_grad()
    network.to(CUDA)
    network(inputs.to(CUDA))[0].square().sum().backward()
    for parameter, gradient in zip(network.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.cpu(), gradient)


def test_what_gives_the_host_a_value_waits_and_is_counted() -> None:
    values = torch.arange(6, device=CUDA)
    with cudasim.counting() as counts:
        kept = values[values > 2]
    assert counts["cudaStreamSynchronize"] >= 1
    with cudasim.counting() as counts:
        kept.add_(1)
    assert "cudaStreamSynchronize" not in counts
    assert counts["cudaLaunchKernel"] == 1


def test_an_error_of_a_launch_is_reported() -> None:
    values = torch.ones(3, device=CUDA)
    cudasim.fail("cudaLaunchKernel", cudasim.OUT_OF_MEMORY)
    with pytest.raises(torch.AcceleratorError, match="out of memory"):
        values + 1
    assert (values + 1).sum().item() == 6
