"""Which samples a rank trains on: the same global batches for any number of ranks.

An epoch is one permutation. A position in it, which all ranks share, says which samples were trained on. A
global batch is cut into micro-batches in the same way for every number of ranks. The number only decides
which rank computes which micro-batches. So no sample is skipped or repeated when ranks come and go between
two global batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import torch

from gpuslice.errors import RefusedSnapshotError, UsageError

#: How more ranks are used: see `ElasticSampler`.
Scaling = Literal["accumulation", "learning_rate"]
_SCALINGS = ("accumulation", "learning_rate")


class MicroBatch(NamedTuple):
    """Samples that pass through the model together.

    Attributes
    ----------
    indices
        Indices in the dataset.
    seed
        What the random number generators start from, whichever rank computes it.
    """

    indices: tuple[int, ...]
    seed: int


class Share(NamedTuple):
    """One rank's part of a global batch.

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
    """Distributes the samples of a dataset over any number of ranks.

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
        True for an order of its own in every epoch, which follows from ``seed`` and the epoch.
    seed
        Seed of the order, and of the generators, which are seeded anew for every micro-batch.
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
        #: Samples trained on in former epochs, without dropped ones.
        self._earlier = 0
        self._length = len(dataset)
        self._batch_size, self._micro_batch_size = batch_size, micro_batch_size
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self.scaling = scaling
        self._order: tuple[int, torch.Tensor] | None = None

    @property
    def samples(self) -> int:
        """Number of samples trained on since the first epoch."""
        return self._earlier + self.position

    def more(self, width: int) -> bool:
        """Return True if the epoch has another global batch for ``width`` ranks."""
        return self._samples(self.position, width) > 0

    def rest(self, rank: int, width: int, *, even: bool = False) -> Iterator[Share]:
        """Yield the shares of ``rank`` from here to the end of the epoch, while there are ``width`` ranks.

        With ``even``, each share has as many micro-batches, of which some are repeated.
        """
        position = self.position
        while samples := self._samples(position, width):
            mine = self._micro_batches(position, samples, rank, width)
            more = -(-samples // (self._micro_batch_size * width)) - len(mine) if even else 0
            first = self._micro_batches(position, samples, 0, 1)[:1] if more else ()
            yield Share(samples, mine, (mine[-1:] or first) * more)
            position += samples

    def _samples(self, position: int, width: int) -> int:
        """Return the samples of the global batch that begins at ``position``; 0 if there is none."""
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
        """Move on by a global batch, after the optimizer's step."""
        self.position += share.samples

    def next_epoch(self) -> None:
        """Begin the next epoch."""
        self._earlier += self.position
        self.epoch, self.position = self.epoch + 1, 0

    def _indices(self) -> torch.Tensor:
        """Return the order of samples in the present epoch."""
        if self._order is None or self._order[0] != self.epoch:
            generator = torch.Generator().manual_seed(self._seed_at(-1))
            order = torch.randperm(self._length, generator=generator)
            self._order = (self.epoch, order if self._shuffle else torch.arange(self._length))
        return self._order[1]

    def _seed_at(self, position: int) -> int:
        """Return a unique seed for ``position`` of the present epoch."""
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
        """Return epoch and position, and the settings that give them their meaning."""
        progress = {"epoch": self.epoch, "position": self.position, "earlier": self._earlier}
        return {**progress, **self._settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken.

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
