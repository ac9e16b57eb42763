"""Which samples a rank trains on: the same global batches whatever the number of ranks.

An epoch is one permutation. A position in it, which all ranks share, says what has been trained on. A global
batch is cut into micro-batches in the same way for every width; the width only decides which rank computes
which of them. So no sample is left out or seen twice when ranks come and go between two global batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import torch

from gpuslice.errors import RefusedSnapshotError, UsageError

#: What is done about more ranks: see `ElasticSampler`.
Scaling = Literal["accumulation", "learning_rate"]
_SCALINGS = ("accumulation", "learning_rate")


class MicroBatch(NamedTuple):
    """Samples that go through the model together.

    Attributes
    ----------
    indices
        Of the dataset.
    seed
        What the random number generators start from, whichever rank computes it.
    """

    indices: tuple[int, ...]
    seed: int


class Share(NamedTuple):
    """What one rank does of a global batch.

    Attributes
    ----------
    samples
        How many the global batch has, on all ranks together.
    micro_batches
        This rank's; none, if there are more ranks than micro-batches.
    repeated
        Further ones, which are another's or this rank's already, so that all ranks have as many.
    """

    samples: int
    micro_batches: tuple[MicroBatch, ...]
    repeated: tuple[MicroBatch, ...] = ()


class ElasticSampler:
    """Deals the samples of a dataset out to however many ranks there are.

    Parameters
    ----------
    dataset
        Anything with a length.
    batch_size
        Samples of a global batch, on all ranks together, for which the optimizer makes one step. Under
        ``scaling="learning_rate"``: for each rank.
    micro_batch_size
        Samples that go through the model together. A rank accumulates the gradients of its micro-batches.
    shuffle
        Whether every epoch has an order of its own; it follows from ``seed`` and the epoch.
    seed
        Of the order, and of the generators, which are seeded anew for every micro-batch.
    drop_last
        Leave the samples out that do not fill a global batch.
    scaling
        ``accumulation``: the global batch stays the same, and fewer ranks accumulate more. ``learning_rate``:
        the global batch grows with the number of ranks, and the learning rate with it.

    Attributes
    ----------
    epoch
        The one that is going on, from 0.
    position
        Samples of it that were trained on.

    Raises
    ------
    UsageError
        If a size is not possible.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        micro_batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        scaling: Scaling = "accumulation",
    ) -> None:
        if not 1 <= micro_batch_size <= batch_size:
            raise UsageError(
                f"micro-batches of {micro_batch_size} samples do not fit a batch of {batch_size}",
                "give 1 <= micro_batch_size <= batch_size",
            )
        if scaling not in _SCALINGS:
            raise UsageError(f"there is no scaling {scaling!r}", f"choose of {', '.join(_SCALINGS)}")
        self.epoch = self.position = 0
        #: Samples of former epochs that were trained on; without those that were dropped.
        self._earlier = 0
        self._length = len(dataset)
        self._batch_size, self._micro_batch_size = batch_size, micro_batch_size
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self.scaling = scaling
        self._order: tuple[int, torch.Tensor] | None = None

    @property
    def samples(self) -> int:
        """How many were dealt out and trained on since the first epoch."""
        return self._earlier + self.position

    def more(self, width: int) -> bool:
        """Whether the epoch has another global batch for ``width`` ranks."""
        return self._samples(self.position, width) > 0

    def rest(self, rank: int, width: int, *, even: bool = False) -> Iterator[Share]:
        """The shares of ``rank`` from here to the end of the epoch, while there are ``width`` ranks.

        ``even``: each with as many micro-batches, of which some are repeated.
        """
        position = self.position
        while samples := self._samples(position, width):
            mine = self._micro_batches(position, samples, rank, width)
            more = -(-samples // (self._micro_batch_size * width)) - len(mine) if even else 0
            first = self._micro_batches(position, samples, 0, 1)[:1] if more else ()
            yield Share(samples, mine, (mine[-1:] or first) * more)
            position += samples

    def _samples(self, position: int, width: int) -> int:
        """Of the global batch that begins at ``position``; 0: there is none."""
        full = self._batch_size * (width if self.scaling == "learning_rate" else 1)
        left = self._length - position
        return min(full, left) if not self._drop_last or left >= full else 0

    def _micro_batches(self, position: int, samples: int, rank: int, width: int) -> tuple[MicroBatch, ...]:
        size = self._micro_batch_size
        count = -(-samples // size)
        order = self._indices()
        end = position + samples
        mine = range(count * rank // width, count * (rank + 1) // width)
        starts = [position + size * number for number in mine]
        return tuple(
            MicroBatch(tuple(order[start : min(start + size, end)].tolist()), self._seed_at(start))
            for start in starts
        )

    def advance(self, share: Share) -> None:
        """The optimizer has made its step for a global batch."""
        self.position += share.samples

    def next_epoch(self) -> None:
        """Begin the next epoch."""
        self._earlier += self.position
        self.epoch, self.position = self.epoch + 1, 0

    def _indices(self) -> torch.Tensor:
        """The order of the present epoch."""
        if self._order is None or self._order[0] != self.epoch:
            generator = torch.Generator().manual_seed(self._seed_at(-1))
            order = torch.randperm(self._length, generator=generator)
            self._order = (self.epoch, order if self._shuffle else torch.arange(self._length))
        return self._order[1]

    def _seed_at(self, position: int) -> int:
        """A seed for what begins at ``position`` of the epoch, like no other."""
        words = f"{self._seed} {self.epoch} {position}".encode()
        return int.from_bytes(blake2b(words, digest_size=7).digest(), "little")

    def _settings(self) -> dict[str, Any]:
        return {
            "length": self._length,
            "batch_size": self._batch_size,
            "micro_batch_size": self._micro_batch_size,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "drop_last": self._drop_last,
            "scaling": self.scaling,
        }

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position, and by what they were counted."""
        progress = {"epoch": self.epoch, "position": self.position, "earlier": self._earlier}
        return {**progress, **self._settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Raises
        ------
        RefusedSnapshotError
            If the dataset or the batches are others: the position would mean something else.
        """
        for name, here in self._settings().items():
            if state.get(name) != here:
                raise RefusedSnapshotError(
                    f"the sampler's {name} is {here} here, but was {state.get(name)!r}",
                    "go on with the same data and batches, or start under another job name",
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        # States of before there was "earlier" have seen whole epochs, as far as they tell.
        self._earlier = int(state.get("earlier", self.epoch * self._length))
