"""Pauses between tries of what has failed. Each is twice as long as the one before, up to a bound."""

from __future__ import annotations

import msgspec

#: Further doublings of a pause make no difference, and would overflow in the end.
_MOST_DOUBLINGS = 30


class BackOff(msgspec.Struct):
    """The pauses, ever longer, between the tries of something that has failed.

    Attributes
    ----------
    first_s, most_s
        The first pause and the longest, in seconds.
    failures
        Failed tries since the last success.
    until_s
        The end of the present pause, on the caller's clock; 0 if nothing has failed.
    """

    first_s: float
    most_s: float
    failures: int = 0
    until_s: float = 0.0

    def failed(self, now: float) -> None:
        """Count a failed try, and begin the next pause."""
        doublings = min(self.failures, _MOST_DOUBLINGS)
        self.until_s = now + min(self.first_s * 2**doublings, self.most_s)
        self.failures += 1

    def succeeded(self) -> None:
        """Forget all failures: the next pause is the first again."""
        self.failures, self.until_s = 0, 0.0

    def pauses(self, now: float) -> bool:
        """Return True if it is too early for the next try."""
        return now < self.until_s
