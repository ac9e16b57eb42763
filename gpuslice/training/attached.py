"""The interface of an attached job to the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Attached(Protocol):
    """The interface of an attached job, as the runtime needs it for a suspend.

    Attributes
    ----------
    replicated
        True if a restart of all ranks needs the snapshot of only one rank.
    samples
        Number of samples trained on, by all ranks together; 0 if the job does not count them.
    """

    replicated: bool

    @property
    def samples(self) -> int: ...

    @property
    def interruptible(self) -> bool:
        """True if the job's state can be suspended at the present boundary."""
        ...

    def named_state(self) -> Mapping[str, object]:
        """Return the state that a restart in another process needs, by name."""
        ...

    def restartable(self, *, explicit: bool) -> bool:
        """Return True if the named state is consistent now. ``explicit``: the script marked this boundary."""
        ...

    @property
    def obstacle(self) -> str:
        """Why the named state is inconsistent, if an attribute that cannot be saved causes it; else ""."""
        ...

    @property
    def restartable_later(self) -> bool:
        """True if the named state will probably be consistent at a later boundary."""
        ...

    def end(self, cause: str) -> None:
        """End the attachment: from now on the job's loops raise an error that names ``cause``."""
        ...
