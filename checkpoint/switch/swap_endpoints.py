"""The two ends of a swap, and the socket at which they meet (``swap_protocol`` says what goes through it)."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from gpuslice.checkpoint.files import listen, short_path
from gpuslice.errors import HandoverError

from .swap_protocol import (
    PATIENCE_S,
    SOCKET,
    VERSION,
    Answer,
    Back,
    End,
    Failed,
    FromPredecessor,
    FromSuccessor,
    Gave,
    Offer,
    PeerClosed,
    PeerExited,
    Terms,
    Whole,
    from_predecessor,
    from_successor,
    new_socket,
)

#: What leaves or comes at once: small beside a state, large beside what it costs to give memory back.
PORTION_BYTES = 512 << 20
#: How long the predecessor, whose device is idle, waits for an answer; and the successor for the offer.
_ANSWER_S = 5.0
_ERROR_CHARACTERS = 1000


class PredecessorEnd(End[FromSuccessor]):
    """The end of the one that leaves.

    Attributes
    ----------
    problem
        Why nothing need be given back before the end; empty: it is worth it.
    """

    def __init__(self, connection: socket.socket, patience_s: float, portion_bytes: int) -> None:
        super().__init__(connection, from_successor, patience_s)
        self._back = False
        self.portion_bytes = portion_bytes
        self.problem = "nothing was offered"

    def offer(self, terms: Terms, nbytes: int) -> None:
        """Say what will be given back before the end, and hear whether the successor can use it."""
        self.send(Offer(VERSION, terms, nbytes))
        if not nbytes:
            return
        try:
            answer = self.receive(min(_ANSWER_S, self.patience_s))
        except (PeerExited, PeerClosed, HandoverError) as error:
            self.problem = f"whoever was to come has gone away {error}".rstrip()
        else:
            self.problem = answer.problem if isinstance(answer, Answer) else "whoever was to come is silent"

    def gave(self, nbytes: int) -> None:
        """The device has ``nbytes`` back, in all so far. What there is no room to say, the next one says."""
        self.try_send(Gave(nbytes))

    def whole(self) -> None:
        """Everything is published, and nothing is left on the device."""
        self.send(Whole())

    def failed(self, error: BaseException) -> None:
        """Everything is wanted back."""
        self.send(Failed(f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]))

    def await_back(self, timeout_s: float) -> bool:
        """Wait until nothing of the successor's is on the device; whether that is so."""
        deadline_s = time.monotonic() + timeout_s
        while not self._back:
            try:
                heard = self.receive(max(0.0, deadline_s - time.monotonic()))
            except PeerExited:
                self._back = True
            except (PeerClosed, HandoverError):  # no more is to be expected of it: only its end is certain
                self._back = self.await_end(max(0.0, deadline_s - time.monotonic()))
                break
            else:
                if heard is None:
                    break
                self._back = isinstance(heard, Back)
        return self._back


@dataclass(frozen=True, slots=True)
class Successor:
    """Who comes to the device next, and where it waits.

    Attributes
    ----------
    directory
        Of its store.
    terms
        Of the swap.
    overlapped
        Whether anything is to be given back before everything is published.
    portion_bytes
        What is given back at once.
    patience_s
        How long to wait for a word of it.
    """

    directory: Path
    terms: Terms
    _: KW_ONLY
    overlapped: bool = True
    portion_bytes: int = PORTION_BYTES
    patience_s: float = PATIENCE_S

    def meet(self, nbytes: int) -> PredecessorEnd | None:
        """Offer it ``nbytes`` of the device; ``None`` if it does not wait there."""
        connection = new_socket()
        try:
            connection.settimeout(min(_ANSWER_S, self.patience_s))
            with short_path(self.directory / SOCKET) as address:
                connection.connect(address)
            predecessor = PredecessorEnd(connection, self.patience_s, self.portion_bytes)
        except (OSError, HandoverError):
            connection.close()
            return None
        predecessor.offer(self.terms, nbytes if self.overlapped else 0)
        return predecessor


class SuccessorEnd(End[FromPredecessor]):
    """The end of the one that comes.

    Attributes
    ----------
    offered_bytes
        What the predecessor will give back before the end; nothing: it waits for no answer.
    given_bytes
        What it has given back so far.
    vacated
        Whether the predecessor is off the device for good: the device is the successor's.
    """

    def __init__(
        self, connection: socket.socket, terms: Terms, patience_s: float, portion_bytes: int
    ) -> None:
        super().__init__(connection, from_predecessor, patience_s)
        self.portion_bytes = portion_bytes
        self._terms = terms
        self.offered_bytes = 0
        self.given_bytes = 0
        self.vacated = False

    def is_offered(self) -> bool:
        """Hear the predecessor's first words; whether it offers this very swap."""
        with suppress(PeerExited, PeerClosed, HandoverError):
            match self.receive(min(_ANSWER_S, self.patience_s)):
                case Offer(version, terms, nbytes) if (version, terms) == (VERSION, self._terms):
                    self.offered_bytes = nbytes
                    return True
        return False

    def answer(self, problem: str = "") -> None:
        """Say whether it is worth giving anything back before the end, or else why not."""
        if self.offered_bytes:
            self.send(Answer(problem[:_ERROR_CHARACTERS]))

    def take_in(self) -> None:
        """Hear what has been said, without waiting for more; ``HandoverError`` as below."""
        while not self.vacated and self._listen(0.0):
            pass

    def await_given(self, nbytes: int) -> None:
        """Wait until the predecessor has given back ``nbytes`` in all, or is off the device.

        Raises
        ------
        HandoverError
            If it wants everything back, or says nothing for too long.
        """
        self.take_in()
        while not self.vacated and self.given_bytes < nbytes:
            self._await_word()

    def await_vacated(self) -> None:
        """Wait until nothing of the predecessor's is on the device; ``HandoverError`` as above."""
        while not self.vacated:
            self._await_word()

    def await_the_whole(self, problem: str) -> None:
        """Take the device only when it is empty, because of ``problem``; ``HandoverError`` as above."""
        try:
            self.answer(problem)
            self.await_vacated()
        except HandoverError:
            self.back()
            raise
        finally:
            self.close()

    def _await_word(self) -> None:
        if not self._listen(self.patience_s):
            raise self._error(f"has not said a word for {self.patience_s:g} s")

    def _listen(self, timeout_s: float) -> bool:
        """Take in one message; whether there was one."""
        try:
            heard = self.receive(timeout_s)
        except PeerExited:
            self.vacated = True
            return True
        except PeerClosed:
            if not self.await_end(self.patience_s):
                raise self._error("left the swap without a word") from None
            self.vacated = True
            return True
        except HandoverError as error:
            raise self._error(error.message) from error
        match heard:
            case None:
                return False
            case Gave(nbytes):
                self.given_bytes = max(self.given_bytes, nbytes)
            case Whole():
                self.vacated = True
            case Failed(reason):
                raise self._error(f"could not leave: {reason}")
            case Offer():
                raise self._error("offers twice")
        return True

    def _error(self, what: str) -> HandoverError:
        return HandoverError(
            f"{self._terms.predecessor}, which was to make room on {self._terms.device}, {what}",
            "resume again when the device is free; the snapshot is kept",
        )

    def back(self) -> None:
        """Nothing of ours is on the device, and nothing will be by this swap."""
        self.send(Back())


class SwapListener:
    """Where a predecessor can knock, as long as it is open: a socket in the successor's own store.

    Parameters
    ----------
    directory
        The store's, which is private to the user and locked by this process.
    terms
        Of the swap; whoever comes with others is sent away.

    Raises
    ------
    HandoverError
        If there can be no socket.
    """

    def __init__(
        self,
        directory: Path,
        terms: Terms,
        *,
        portion_bytes: int = PORTION_BYTES,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._path = directory / SOCKET
        self._terms = terms
        self._portion_bytes = portion_bytes
        self._patience_s = patience_s
        try:
            self._socket = listen(self._path, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise HandoverError(f"there can be no socket in {directory}: {error.strerror}") from error

    def fileno(self) -> int:
        """A descriptor that can be read when somebody knocks."""
        return self._socket.fileno()

    def await_predecessor(self, timeout_s: float) -> SuccessorEnd | None:
        """Wait for the predecessor, which connects before its suspend copies; ``None`` if it does not.

        ``HandoverError`` if it cannot be let in for lack of descriptors, say.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._socket.settimeout(max(0.0, deadline_s - time.monotonic()))
            try:
                connection, _ = self._socket.accept()
            except (TimeoutError, BlockingIOError):
                return None
            except OSError as error:
                raise HandoverError(f"nobody can be let in at {self._path}: {error.strerror}") from error
            try:
                successor = SuccessorEnd(connection, self._terms, self._patience_s, self._portion_bytes)
            except HandoverError:
                connection.close()
                continue
            if successor.is_offered():
                return successor
            successor.close()

    def close(self) -> None:
        """Nobody can knock any more; harmless if it is closed."""
        if self._socket.fileno() >= 0:
            self._socket.close()
            self._path.unlink(missing_ok=True)
