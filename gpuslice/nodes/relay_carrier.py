"""Snapshots between machines without Ray: over the sockets of their agents, by the scheduler's relay."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from gpuslice.errors import GpusliceError, NodeLostError

from .channel import Call, Line, Ready, Result, caller, end
from .end_process import OF_NONE, End
from .messages import Held, decode
from .plan import Config
from .ray_nodes import Node

#: Longest start of an end.
_START_S = 60.0
_LOOK_AGAIN_S = 0.5


class Reference:
    """The result of a call, once it is there; and the calls that wait for it."""

    def __init__(self) -> None:
        self.result: Result | None = None
        self.waiting: list[_Pending] = []


class _Pending:
    """A call whose arguments are not all there yet."""

    def __init__(self, node: str, method: str, words: tuple[Any, ...], reference: Reference) -> None:
        self.node, self.method, self.words, self.reference = node, method, words, reference

    def missing(self) -> Reference | None:
        """Return the first argument that is not there yet; None if all are."""
        return next((one for one in self.words if isinstance(one, Reference) and one.result is None), None)


class _Method:
    def __init__(self, begin: Any, method: str) -> None:
        self._begin, self._method = begin, method

    def remote(self, *words: Any) -> Reference:
        reference: Reference = self._begin(self._method, words)
        return reference


class _Handle:
    """One end of a shipment, with the methods of ``Sender`` or ``Receiver``."""

    def __init__(self, begin: Any) -> None:
        self._begin = begin

    def __getattr__(self, method: str) -> _Method:
        return _Method(self._begin, method)


class RelayCarrier:
    """What moves snapshots between the scheduler's nodes; a context manager. See ``shipping.Carrier``.

    Bytes between two other nodes pass through this process.

    Parameters
    ----------
    config
        Endpoint and keys, as an agent has them.
    flags
        Settings of this node for ``Sender`` and ``Receiver``. Without a ``socket`` jobs are of no scheduler.
    answer_s
        How long the scheduler may be silent.
    """

    def __init__(self, config: Config, flags: Mapping[str, str], answer_s: float = 30.0) -> None:
        self._config = config
        self._answer_s = answer_s
        self._channel = f"{'' if 'socket' in flags else OF_NONE}{os.urandom(8).hex()}"
        #: The node of this process has its end here.
        self._own = End(flags)
        self._ready: set[str] = set()
        #: The nodes that were asked to start an end, as far as it has not gone.
        self._asked: set[str] = set()
        self._number = 0
        self._called: dict[int, tuple[str, Reference]] = {}

    def __enter__(self) -> RelayCarrier:
        self._line = Line(self._config, caller(self._channel), self._answer_s)
        return self

    def __exit__(self, *exception: object) -> None:
        self._line.__exit__(*exception)  # its ends notice that

    def sender(self, node: Node) -> Any:
        """Return an end on ``node`` that sends."""
        return self._open(node)

    def receiver(self, node: Node, *, replace: bool, portion_bytes: int) -> Any:
        """Return an end on ``node`` that receives."""
        handle = self._open(node)
        self.result(handle.open.remote(replace, portion_bytes))
        return handle

    def result(self, reference: Any) -> Any:
        """Return what a call has returned, or raise what it has raised."""
        while reference.result is None:
            self._listen()
        return reference.result.get()

    def settle(self, references: Iterable[Any]) -> None:
        """Wait for results that are no longer needed."""
        for reference in references:
            with suppress(GpusliceError):
                self.result(reference)

    def end(self, handle: Any) -> None:
        """Leave an end to other shipments: it ends with this process."""

    def call(self, node: Node, method: str, *words: Any) -> Any:
        """Return what a method of the end on ``node`` returns."""
        return self.result(self._open(node).__getattr__(method).remote(*words))

    def held_on(self, job: str, node: Node, ranks: int | None = None) -> Held | None:
        """Return the newest whole snapshot of a job on a node; None if it has none."""
        found: bytes | None = self.call(node, "held", job, ranks)
        return None if found is None else decode(found, Held)

    def start(self, nodes: Iterable[Node]) -> None:
        """Have an end started on each of ``nodes`` at once. Its start is waited for when it is called."""
        for node in nodes:
            if node.id and node.id not in self._asked:
                self._asked.add(node.id)
                self._line.ask_for(node.id, self._channel)

    def _open(self, node: Node) -> _Handle:
        """Return the end on a node, which is started if need be.

        Raises
        ------
        NodeLostError
            If it does not come.
        """
        if node.id and node.id not in self._ready:
            self.start([node])
            ends_s = time.monotonic() + _START_S
            while node.id not in self._ready:
                if self._listen() == node.id or time.monotonic() > ends_s:
                    raise NodeLostError(*_lost(node.id))
        return _Handle(partial(self._begin, node.id))

    def _begin(self, node: str, method: str, words: tuple[Any, ...]) -> Reference:
        pending = _Pending(node, method, words, Reference())
        self._go_on(pending)
        return pending.reference

    def _go_on(self, first: _Pending) -> None:
        """Make a call, or note what it waits for. Results that are there at once let others go on."""
        left = deque([first])
        while left:
            pending = left.popleft()
            if (missing := pending.missing()) is not None:
                missing.waiting.append(pending)
                continue
            given = [one.result if isinstance(one, Reference) else one for one in pending.words]
            failed = next((one for one in given if isinstance(one, Result) and one.error), None)
            words = tuple(one.value if isinstance(one, Result) else one for one in given)
            if failed is None and pending.node:
                self._number += 1
                self._called[self._number] = (pending.node, pending.reference)
                self._line.send(end(self._channel, pending.node), Call(self._number, pending.method, words))
                continue
            pending.reference.result = failed or self._answer(pending.method, words)
            left.extend(pending.reference.waiting)

    def _answer(self, method: str, words: tuple[Any, ...]) -> Result:
        """Return the answer of this node's own end."""
        try:
            return Result(0, self._own.answer(method, words))
        except GpusliceError as error:
            return Result(0, None, type(error).__name__, error.message, error.remedy)

    def _listen(self) -> str:
        """Take the next message. Return the name of a node that it says is not there; empty for no such node.

        While there is no message, ask whether the others are still there.
        """
        heard = self._line.receive(_LOOK_AGAIN_S)
        if self._line.was_broken():
            for lost in list(self._ready):
                self._fail_calls(lost)
        if heard is None:
            for node in self._ready:
                self._line.send(end(self._channel, node), None)
            return ""
        node = heard.sender.removeprefix(end(self._channel, ""))
        if heard.message is None:
            gone = heard.sender != node and node in self._ready
            if gone or heard.sender == node:
                self._ready.discard(node)
                self._asked.discard(node)
                self._fail_calls(node)
            return "" if gone else heard.sender
        if isinstance(heard.message, Ready):
            self._fail_calls(node)  # if it said so before, its connection has broken
            self._ready.add(node)
        elif isinstance(heard.message, Result) and heard.message.number in self._called:
            self._resolve(heard.message.number, heard.message)
        return ""

    def _fail_calls(self, node: str) -> None:
        """Have all calls to the end on ``node`` fail: they, or their results, are lost."""
        message, remedy = _lost(node)
        for number, (where, _) in list(self._called.items()):
            if where == node:
                self._resolve(number, Result(number, None, NodeLostError.__name__, message, remedy))

    def _resolve(self, number: int, result: Result) -> None:
        _, reference = self._called.pop(number)
        reference.result = result
        for pending in reference.waiting:
            self._go_on(pending)


def _lost(node: str) -> tuple[str, str]:
    return (
        f"node {node} is not there, or gpuslice's process on it has gone",
        "`gpuslice events` says what is known of it; the same command goes on with what has not arrived",
    )
