"""A snapshot of named state that is copied while the training continues.

Parameters and optimizer state do not change between a boundary and the next optimizer step. So their copy can
be made later, and the step waits for it. Everything else (buffers, gradients, averages, scales) may change in
the next forward pass and is copied at once. Nothing is taken on trust: a storage is copied later only if no
unknown tensor is over it. After the copy, torch's version counters are compared, and then checksums, because
not all writes are counted. If something has changed, the snapshot is given up, and what changed is copied at
once from then on.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch.utils._pytree import tree_leaves

from gpuslice.checkpoint.discover.live_instances import live_instances
from gpuslice.checkpoint.format.checksums import digest
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.gate import OWN_PREFIX
from gpuslice.checkpoint.named.describe import keeps_own_state_dict
from gpuslice.checkpoint.named.state import describe
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.ramdisk.writer import SnapshotWriter
from gpuslice.errors import UsageError
from gpuslice.kernels import Device
from gpuslice.kernels.transfer import Checksums, Pairs

from .capture_plan import plan_capture

#: Smaller storages are copied at once: that takes less time than watching them.
WAITING_BYTES = 64 << 10


class BackgroundSnapshot:
    """A snapshot taken while the training goes on. The constructor copies what cannot wait.

    Call `check` before waiting storages may change, and `settle` before the store is used again.

    Parameters
    ----------
    device, store
        The device that has the state, and the store of the snapshot.
    named
        The objects to save (``state.describe``); the snapshot is restartable.
    boundary
        The boundary at which the job is.
    copy_at_once
        Paths of tensors that must not wait.

    Raises
    ------
    SuspendRefusedError, UsageError, RamDiskFullError
        As for a suspend; the state and the newest restartable snapshot are as they were.
    """

    def __init__(
        self,
        device: Device,
        store: JobStore,
        named: Mapping[str, object],
        *,
        boundary: int,
        copy_at_once: Collection[str] = (),
    ) -> None:
        state = describe(named)
        if state.unsaved:
            raise UsageError(
                state.unsaved[0], "no other process can go on without it: attach what can be saved"
            )
        plan = plan_capture(device, (), state.tensors)
        self._tree = state.tree
        self._tensors = plan.tensors
        self.boundary = boundary
        self.nbytes = plan.layout.nbytes
        self.error: Exception | None = None
        #: Paths of tensors that changed although they should not have. Then there is no snapshot.
        self.changed: tuple[str, ...] = ()
        #: The snapshot, once it is published.
        self.snapshot: SnapshotFile | None = None
        self._device = device
        self._lock = threading.Lock()
        self._checked = False
        self._publisher: threading.Thread | None = None
        owned = [] if _counters_unreliable(device) else list(_owned(named))
        watched = _deferrable(owned, state.tensors, copy_at_once)
        storages = {tensor.untyped_storage()._cdata for _, tensor in watched}
        self._watched = [(path, tensor, tensor._version) for path, tensor in watched]
        self._writer = store.begin(plan.layout, share=device.torch_device.type == "cpu")
        try:
            # The copying thread cannot know on which streams the last step may still be running.
            device.synchronize()
            later = self._copy_at_once(plan.extras, storages)
            self._deferred = _DeferredCopy(device, later, self._writer)
            self._copier = _in_background(self._copy)
        except BaseException:
            self._writer.abort()
            raise

    def _copy_at_once(self, extras: Sequence[torch.UntypedStorage], waiting: Collection[int]) -> Pairs:
        """Copy the storages that cannot wait, and return the others."""
        pairs = list(zip(extras, self._writer.offsets, strict=True))
        self._writer.take(self._device, (pair for pair in pairs if pair[0]._cdata not in waiting))
        return [pair for pair in pairs if pair[0]._cdata in waiting]

    def _copy(self) -> None:
        # These chunks are not inspected, so `publish` hashes them in the arena.
        self._noting_errors(self._deferred.copy)

    @property
    def copied(self) -> bool:
        """True if everything is copied, so that `check` need not wait."""
        return self._copier is None or not self._copier.is_alive()

    @property
    def over(self) -> bool:
        """True if the snapshot is published or has failed, so that `settle` need not wait."""
        publishing = self._publisher is not None and self._publisher.is_alive()
        return self._checked and not publishing

    def check(self) -> None:
        """Wait for the copy, and check that the storages have not changed.

        Call it in the training's thread, before it changes them. Only that thread can tell: a change under
        way shows in the version counter when it is complete.
        """
        with self._lock:
            if not self._checked:
                if self._copier is not None:
                    self._copier.join()
                self.changed = tuple(path for path, tensor, was in self._watched if tensor._version != was)
                if not self.changed and self.error is None:
                    self._noting_errors(self._compare)
                self._watched.clear()
                self._checked = True

    def _compare(self) -> None:
        """Compare the bytes with those that were copied, and record what has changed."""
        changed = self._deferred.changed()
        self.changed = tuple(
            path for path, tensor, _ in self._watched if tensor.untyped_storage()._cdata in changed
        )

    def publish_soon(self) -> None:
        """Checksum and publish in the background, after `check`, unless something went wrong."""
        with self._lock:
            if self._publisher is None and self.snapshot is None and self._good:
                self._publisher = _in_background(self._publish)

    @property
    def _good(self) -> bool:
        return self._checked and not self.changed and self.error is None

    def _publish(self) -> None:
        def publish() -> None:
            self.snapshot = self._writer.publish(
                self._tree, self._tensors, boundary=self.boundary, restartable=True
            )

        self._noting_errors(publish)

    def settle(self, *, keep: bool = True) -> SnapshotFile | None:
        """Finish: publish the snapshot, or give it up if it failed or is not to be kept. Return it or None.

        The store may be used again afterwards.
        """
        self.check()
        if keep:
            self.publish_soon()
        if self._publisher is not None:
            self._publisher.join()
        if self.snapshot is None:
            self._writer.abort()
        return self.snapshot

    def _noting_errors(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - `settle` shows it to the training thread
            self.error = error


def _in_background(work: Callable[[], object]) -> threading.Thread | None:
    """Start ``work`` in a thread of its own. If the system gives no more threads, do it here."""
    thread = threading.Thread(target=work, name=f"{OWN_PREFIX}checkpoint")
    try:
        thread.start()
    except RuntimeError:
        work()
        return None
    return thread


class _Noted:
    """The checksums of chunks that are recorded now and copied later (see `Checksums`)."""

    def __init__(self, checksums: Checksums) -> None:
        self.padded = checksums.padded
        self.sums: dict[int, int] = {}

    def note(self, offset: int, nbytes: int, checksum: int) -> bool:
        self.sums[offset] = checksum
        return True


class _DeferredCopy:
    """Storages that are copied later, and whether they have changed meanwhile.

    Every chunk's checksum is noted first. The copy must have it. A device that sums chunks in place must find
    it again after the copy.
    """

    def __init__(self, device: Device, pairs: Pairs, writer: SnapshotWriter) -> None:
        self._device, self._pairs, self._writer, self._arena = device, pairs, writer, writer.arena
        self._changed: set[int] = set()
        self._digests, self._summed = self._look()

    def _look(self) -> tuple[dict[int, tuple[int, int]], dict[int, int]]:
        """Return lengths and checksums by the host, and checksums by the device, by the chunks' offsets."""
        digests: dict[int, tuple[int, int]] = {}

        def by_host(offset: int, data: memoryview) -> bool:
            digests[offset] = len(data), digest(data)
            return False

        by_device = _Noted(self._writer.checksums)
        self._device.copy_out(self._pairs, self._arena, by_host, by_device)
        return digests, by_device.sums

    def copy(self) -> None:
        """Copy the storages, and compare the copies with the noted checksums."""
        self._writer.take_later(self._device, self._pairs)
        for offset, (nbytes, expected) in self._digests.items():
            if digest(self._arena[offset : offset + nbytes]) != expected:
                self._changed.add(offset)

    def changed(self) -> set[int]:
        """Return the ``_cdata`` of the storages that have changed meanwhile."""
        if self._summed:
            digests, summed = self._look()
            self._changed |= {offset for offset, _ in self._digests.items() ^ digests.items()}
            self._changed |= {offset for offset, _ in self._summed.items() ^ summed.items()}
        return {
            storage._cdata
            for storage, offset in self._pairs
            if any(offset <= at < offset + storage.nbytes() for at in self._changed)
        }


def _counters_unreliable(device: Device) -> bool:
    """Return True if something changes tensors but not their version counters: a captured CUDA graph."""
    return bool(device.obstacles) and any(live_instances(*device.obstacles))


def _owned(named: Mapping[str, object]) -> Iterator[torch.Tensor]:
    """Yield the tensors that only the optimizers in ``named`` change: their parameters and their state."""
    for optimizer in tree_leaves(dict(named)):
        # A step without torch's hooks cannot be made to wait.
        if (
            isinstance(optimizer, torch.optim.Optimizer)
            and not keeps_own_state_dict(optimizer)
            and hasattr(type(optimizer).step, "hooked")
        ):
            for value in tree_leaves([optimizer.param_groups, dict(optimizer.state)]):
                if isinstance(value, torch.Tensor):
                    yield value


def _deferrable(
    owned: Sequence[torch.Tensor],
    named: Sequence[tuple[str, torch.Tensor]],
    copy_at_once: Collection[str],
) -> list[tuple[str, torch.Tensor]]:
    """Return the named tensors whose storages can be copied later.

    All tensors over such a storage are the optimizers' own, or ours over the same bytes. The storage counts
    its references: each tensor once, and its Python object.
    """
    owners: Counter[int] = Counter()
    for tensor in {id(tensor): tensor for tensor in owned}.values():
        if _watchable(tensor):
            owners[tensor.untyped_storage()._cdata] += 1
    ours = Counter(tensor.untyped_storage()._cdata for _, tensor in named)
    barred = {tensor.untyped_storage()._cdata for path, tensor in named if path in copy_at_once}
    found = []
    for path, tensor in named:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in barred or not owners[key] or storage.nbytes() < WAITING_BYTES or not _watchable(tensor):
            continue
        if torch._C._storage_Use_Count(key) == owners[key] + ours[key] + 1:
            found.append((path, tensor))
    return found


def _watchable(tensor: torch.Tensor) -> bool:
    """Return True if the tensor has memory of its own and a version counter."""
    return tensor.layout is torch.strided and torch._C._has_storage(tensor) and not tensor.is_inference()
