"""The I/O thread of a rank, with a DEALER socket that reconnects when the scheduler is started again.

Every connection begins with a greeting.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from gpuslice.clock import Clock, MonotonicClock
from gpuslice.errors import EnvironmentUnusableError, RemoteProtocolError
from gpuslice.runtime.ending import say
from gpuslice.wire import FromAgent, Progress, ToAgent, decode_to_agent, encode

HEARTBEAT_S = 0.5
#: How long the last messages may take to leave when the process ends.
LINGER_MS = 1000
#: Interval at which a `Link.send` that waits checks that the I/O thread still runs.
_LOOK_AGAIN_MS = 200
_OUTBOX = "inproc://outbox"
_END = b""

_T = TypeVar("_T")


class Link:
    """A connection to the scheduler, served by a thread of its own.

    Parameters
    ----------
    endpoint, identity
        The scheduler's endpoint, and the identity of the DEALER socket.
    greeting
        Returns the first messages of every new connection.
    progress
        Returns the heartbeat.
    handle
        Called in the I/O thread with each message that arrives. Returns the answers.

    Attributes
    ----------
    silent
        True if this process is no rank. It then sends neither greeting nor heartbeat.
    """

    def __init__(
        self,
        endpoint: str,
        identity: str,
        *,
        greeting: Callable[[], Sequence[FromAgent]],
        progress: Callable[[], Progress],
        handle: Callable[[ToAgent], Sequence[FromAgent]],
        clock: Clock | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._greeting = greeting
        self._progress = progress
        self._handle = handle
        self.silent = False
        self._clock = clock or MonotonicClock()
        self._context = zmq.Context()
        self._unsent: deque[bytes] = deque()
        self._greeted = False
        self._told: set[str] = set()
        self._sending = threading.Lock()
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.setsockopt(zmq.SNDTIMEO, _LOOK_AGAIN_MS)
        self._thread = threading.Thread(target=self._run, name="gpuslice-link", daemon=True)

    def start(self) -> None:
        """Start the I/O thread, which connects. Return at once, even if there is no scheduler yet."""
        inbox = self._context.socket(zmq.PULL)
        inbox.bind(_OUTBOX)
        self._inbox = inbox
        self._outbox.connect(_OUTBOX)
        self._thread.start()

    def send(self, message: FromAgent) -> None:
        """Hand ``message`` to the I/O thread, which sends it.

        Raises
        ------
        EnvironmentUnusableError
            If the I/O thread has ended, so that nothing can be sent any more.
        """
        self._hand_over(encode(message))

    def _hand_over(self, frame: bytes) -> None:
        while self._thread.is_alive():
            with suppress(zmq.Again), self._sending:  # a socket is for one thread at a time
                self._outbox.send(frame)
                return
        raise EnvironmentUnusableError(
            "the thread that talks to the scheduler has ended",
            "its traceback is on stderr",
        )

    def close(self) -> None:
        """Send the messages that were handed over, if the scheduler is there, and end the I/O thread."""
        if self._thread.ident is not None:
            with suppress(EnvironmentUnusableError):
                self._hand_over(_END)
            self._thread.join()
        self._context.destroy(linger=LINGER_MS)

    def _run(self) -> None:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, self._identity.encode())
        # Queue nothing for a scheduler that is not there: Hello has to be the first thing it hears.
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.LINGER, LINGER_MS)
        monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        dealer.connect(self._endpoint)
        try:
            self._serve(dealer, monitor)
        finally:
            dealer.disable_monitor()
            for socket in (monitor, self._inbox, dealer):
                socket.close()

    def _serve(self, dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        for socket in (dealer, monitor, self._inbox):
            poller.register(socket, zmq.POLLIN)
        beat_s = self._clock.now() + HEARTBEAT_S
        while True:
            poller.register(dealer, zmq.POLLIN | (zmq.POLLOUT if self._greeted and self._unsent else 0))
            ready = dict(poller.poll(max(0, round((beat_s - self._clock.now()) * 1e3))))
            due = self._clock.now() >= beat_s
            if ready.get(dealer, 0) & zmq.POLLIN:
                self._unsent += self._receive(dealer.recv_multipart())
            ending = self._inbox in ready and self._collect() is _END
            beat = self._beat() if due and self._greeted and not self.silent else None
            # As late as possible: another scheduler may have come while this thread did not run.
            while monitor.poll(0):
                self._follow(recv_monitor_message(monitor)["event"])
            if self._greeted:
                self._flush(dealer)
                if beat is not None and not self._unsent:
                    self._send(dealer, beat)
            if ending:
                return
            if due:
                beat_s = self._clock.now() + HEARTBEAT_S

    def _follow(self, event: int) -> None:
        """Note that a connection has begun or ended. Queue the greeting for a new one."""
        self._greeted = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self._greeted:
            # The greeting tells the present state; messages that an earlier scheduler missed are outdated.
            self._unsent = deque(map(encode, () if self.silent else self._greeting()))

    def _collect(self) -> bytes | None:
        """Queue one frame of the main thread. Return ``_END`` if the main thread sends no more, else None."""
        frame = self._inbox.recv()
        if frame == _END:
            return _END
        self._unsent.append(frame)
        return None

    def _receive(self, frames: list[bytes]) -> Sequence[bytes]:
        return self._attempt("obey the scheduler", lambda: self._obey(frames[-1])) or ()

    def _obey(self, frame: bytes) -> Sequence[bytes]:
        try:
            message = decode_to_agent(frame)
        except RemoteProtocolError as error:
            say(f"dropped what the scheduler sent: {error.message}")
            return ()
        return [encode(answer) for answer in self._handle(message)]

    def _beat(self) -> bytes | None:
        return self._attempt("make a heartbeat", lambda: encode(self._progress()))

    def _attempt(self, what: str, act: Callable[[], _T]) -> _T | None:
        """Return the result of ``act``, or None if it fails. Report each failure once.

        A moment without file descriptors, say, must not end this thread. Nor must a closed or full stderr.
        """
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - whatever it is, the next order and heartbeat may do
            text = f"could not {what}: {type(error).__name__}: {error}"
            if text not in self._told:
                self._told.add(text)
                with suppress(OSError, ValueError, AttributeError):
                    say(text)
            return None

    def _flush(self, dealer: zmq.Socket[bytes]) -> None:
        while self._unsent and self._send(dealer, self._unsent[0]):
            self._unsent.popleft()

    def _send(self, dealer: zmq.Socket[bytes], frame: bytes) -> bool:
        try:
            dealer.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
