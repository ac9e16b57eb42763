"""A value in the store of the default process group, which all ranks of a gang read and change.

`Store.compare_set` waits forever for a server that does not answer, and for every other thread that waits in
the same store. So an extra thread calls it, and the caller waits for that thread up to a deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import torch.distributed as dist

from gpuslice.checkpoint.gate import OWN_PREFIX

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PATIENCE_S = 5.0
#: Errors of torch's stores, and errors of decoding a value that is not gpuslice's.
_FAILURES = (RuntimeError, UnicodeDecodeError, msgspec.DecodeError)


class StoreUnavailableError(Exception):
    """The store has failed, or has not answered in time."""


def default_store() -> Store:
    """Return the store of the default process group. Not all supported torch versions have a public way.

    Raises
    ------
    StoreUnavailableError
        If there is no default process group, or it has no store.
    """
    if not dist.is_initialized():
        raise StoreUnavailableError("there is no default process group any more")
    store = dist.distributed_c10d._get_default_store()
    if store is None:  # MPI's
        raise StoreUnavailableError("the default process group has no store")
    return store


class SharedValue:
    """A value that all ranks share. A change succeeds only if no other rank was quicker (compare-and-set).

    Parameters
    ----------
    find
        Returns the store. Called for each change: scripts destroy process groups and make new ones.
    patience_s
        How long a change may take, in seconds.
    key
        Key of the value in the store.
    """

    def __init__(
        self,
        find: Callable[[], Store] = default_store,
        patience_s: float = _PATIENCE_S,
        key: str = "gpuslice/snapshots",
    ) -> None:
        self._find = find
        self._key = key
        self._patience_s = patience_s
        self._value = ""
        self._late: threading.Thread | None = None

    def update(self, change: Callable[[str], str]) -> None:
        """Replace the value by ``change(value)``, computed again whenever another rank was quicker.

        Parameters
        ----------
        change
            Takes the value, which is empty if there is none yet, and returns a value that was never there
            before. It is called in another thread, perhaps several times.

        Raises
        ------
        StoreUnavailableError
            If the store has failed, or not answered in time. The value may have been changed all the same,
            or be changed later: by one change at most, and before any other change of this rank.
        """
        if self._late is not None and self._late.is_alive():
            raise StoreUnavailableError("it has yet to answer an earlier question")
        update = _Update(self._find(), self._key, self._value, change)
        thread = threading.Thread(target=update.run, name=f"{OWN_PREFIX}store", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # a limit, or Python is being finalized
            raise StoreUnavailableError(str(error)) from error
        thread.join(self._patience_s)
        if thread.is_alive():
            self._late, update.given_up = thread, True
            raise StoreUnavailableError(f"it has not answered within {self._patience_s:g} s")
        if isinstance(update.error, _FAILURES):
            raise StoreUnavailableError(str(update.error).partition("\n")[0]) from update.error
        if update.error is not None:
            raise update.error
        self._value = update.value


class _Update:
    """One change of the value, attempted until it succeeds or is given up."""

    def __init__(self, store: Store, key: str, value: str, change: Callable[[str], str]) -> None:
        self._store = store
        self._key = key
        self._change = change
        self.value = value
        self.error: BaseException | None = None
        self.given_up = False

    def run(self) -> None:
        try:
            while not self.given_up and not self._attempt():
                pass
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self.error = error

    def _attempt(self) -> bool:
        """Try to change the value. Return False if it was not as expected; then expect what it is now."""
        expected, desired = self.value, self._change(self.value)
        answer = self._store.compare_set(self._key, expected, desired).decode()
        # For a key that does not exist a store answers with what was expected, whatever that is.
        self.value = "" if answer == expected else answer
        return answer == desired
