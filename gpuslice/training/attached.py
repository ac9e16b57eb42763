"""What a runtime wants to know of the job that a script attached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Attached(Protocol):
    """An attached job, as far as a suspend is concerned.

    Attributes
    ----------
    replicated
        Whether a restart of all ranks needs the snapshot of one only.
    samples
        How many it has trained on, all ranks together, if it counts them; else 0.
    """

    replicated: bool

    @property
    def samples(self) -> int: ...

    @property
    def interruptible(self) -> bool:
        """Whether the job can be suspended at the present boundary, as far as its state is concerned."""
        ...

    def named_state(self) -> Mapping[str, object]:
        """What a restart in another process needs."""
        ...

    def restartable(self, *, explicit: bool) -> bool:
        """Whether that is consistent now. ``explicit``: the script marked this boundary itself."""
        ...

    @property
    def obstacle(self) -> str:
        """Why it is not consistent, if an attribute that cannot be saved is the reason; else ""."""
        ...

    @property
    def restartable_later(self) -> bool:
        """Whether it will be, at a later boundary, as far as can be told."""
        ...

    def end(self, cause: str) -> None:
        """End the attachment: the job's loops raise an error that names the cause."""
        ...
