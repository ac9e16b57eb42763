"""Generators of a GPU whose state a resume puts back."""

from __future__ import annotations

import torch

from gpuslice.checkpoint.named.generators import generator_state, set_generator_state


class Counting(torch.Generator):
    """Counts how often its state is set."""

    count = 0

    def set_state(self, new_state: torch.Tensor) -> torch.Generator:
        self.count += 1
        return super().set_state(new_state)


def test_one_that_has_the_state_already_is_left_alone() -> None:
    generator = Counting("cuda:0")
    generator.manual_seed(3)
    _, state = generator_state(generator)
    set_generator_state(generator, state)
    assert generator.count == 0
    expected = torch.randn(8, device="cuda:0", generator=generator)
    set_generator_state(generator, state)
    assert generator.count == 1
    assert torch.equal(torch.randn(8, device="cuda:0", generator=generator), expected)
