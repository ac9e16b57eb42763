"""A rank's part of a global batch: its micro-batches, and the gradients of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from gpuslice.errors import UsageError, hide_own_frames

from . import gradients
from .sampler import ElasticSampler, Share

Named = Sequence[tuple[str, torch.nn.Parameter]]


class Batch:
    """This rank's part of a global batch; made by `World.batches`.

    Iterate over it once for the micro-batches, as the loader collates them, and call `backward` for each.
    When the loop ends, all ranks have the gradients of the mean loss of the global batch.

    Attributes
    ----------
    samples
        Number of samples in the global batch.
    loss
        Its mean loss, on all ranks alike; ``None`` before the loop over it is through.
    repeated
        True if the present micro-batch counts nothing: it is there because, with sharded parameters, all
        ranks compute as many.
    """

    def __init__(self, share: Share, feed: Iterator[Any], parameters: Named, device: torch.device) -> None:
        self.samples = share.samples
        self.loss: float | None = None
        self.repeated = False
        self._share = share
        self._feed = feed
        self._parameters = parameters
        self._device = device
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        #: Weight of the present micro-batch's loss; None once it has been used.
        self._weight: float | None = None

    def __iter__(self) -> Iterator[Any]:
        gradients.require_clear(self._parameters)
        mine = self._share.micro_batches
        for number, micro_batch in enumerate((*mine, *self._share.repeated)):
            torch.manual_seed(micro_batch.seed)
            try:
                data = next(self._feed)
            except BaseException as error:
                hide_own_frames(error)
                raise
            self.repeated = number >= len(mine)
            self._weight = 0.0 if self.repeated else len(micro_batch.indices) / self.samples
            yield data
            if self._weight is not None:
                raise UsageError(
                    "a micro-batch went by without its backward pass", "call batch.backward(loss) for each"
                )
        gradients.add_up(self._parameters)
        if dist.is_initialized():
            dist.all_reduce(self._total)
        self.loss = float(self._total)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass for ``loss``, the mean over the present micro-batch.

        Raises
        ------
        UsageError
            If it is none of a micro-batch of this batch.
        """
        if self._weight is None:
            raise UsageError(
                "batch.backward() was called without a micro-batch of its own",
                "call it once for each micro-batch, in the loop over the batch",
            )
        weight, self._weight = self._weight, None
        self._total += loss.detach().to(self._device, torch.float64) * weight
        (loss * weight).backward()  # type: ignore[no-untyped-call]


class Feed:
    """One rank's micro-batches for the rest of an epoch, as long as the number of ranks stays.

    Parameters
    ----------
    options
        Options of the DataLoader that fetches the micro-batches.
    even
        True if all ranks have as many.
    """

    def __init__(
        self,
        sampler: ElasticSampler,
        dataset: Dataset[Any],
        rank: int,
        width: int,
        options: dict[str, Any],
        *,
        even: bool = False,
    ) -> None:
        self.shares = sampler.rest(rank, width, even=even)
        indices = (
            list(part.indices)
            for share in sampler.rest(rank, width, even=even)
            for part in (*share.micro_batches, *share.repeated)
        )
        self.data = iter(DataLoader(dataset, batch_sampler=_SinglePassBatchSampler(indices), **options))


class _SinglePassBatchSampler:
    """A batch sampler for one iteration."""

    def __init__(self, indices: Iterator[list[int]]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[list[int]]:
        return self._indices


def scale_rates(optimizers: Sequence[torch.optim.Optimizer], factor: Callable[[], float]) -> None:
    """Make all later steps of ``optimizers`` use ``factor()`` times their learning rates."""
    kept: list[tuple[dict[str, Any], Any]] = []

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            kept.append((group, group["lr"]))
            group["lr"] = group["lr"] * factor()

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        while kept:
            group, rate = kept.pop()
            group["lr"] = rate

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
