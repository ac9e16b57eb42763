"""The end of a shipment on a node: ``python -m gpuslice.nodes.end_process``, started by its agent.

It reads an ``Order`` from stdin, and sends or receives snapshots as it is asked over the scheduler's relay.
It ends with its caller, or with the scheduler.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from gpuslice.errors import GpusliceError, RemoteProtocolError
from gpuslice.sched_core.nodes.local_node import rank_endpoint
from gpuslice.types import PathText, Word

from .channel import Call, Line, Ready, Result, caller, end
from .plan import Config
from .receiver import Receiver
from .replication import held_here
from .routes import boundaries
from .sender import Sender

#: What a channel begins with if its job is of no scheduler: `gpuslice run --job`.
OF_NONE = "run-"
_LOOK_AGAIN_S = 0.5
#: Whoever has not been there for so long has gone; how often that is asked.
_GONE_S, _ASK_AGAIN_S = 1.0, 0.2


class Order(msgspec.Struct, frozen=True):
    """What an end must know: its channel, how to connect, and the agent's directory."""

    channel: Word
    config: Config
    directory: PathText


class End:
    """Answers calls on a node; each job's sender and receiver are made by the first call to them.

    Parameters
    ----------
    flags
        Settings of that node that its environment does not say: ``ramdisk_dir``, ``spill_dir``, ``socket``.
    """

    def __init__(self, flags: Mapping[str, str]) -> None:
        self._flags = dict(flags)
        self._sender = Sender(self._flags)
        self._receiver: Receiver | None = None

    def answer(self, method: str, words: tuple[Any, ...]) -> Any:
        """Return what is asked for.

        Raises
        ------
        GpusliceError
            As ``Sender`` and ``Receiver`` do.
        """
        match method, words:
            case "boundaries", (job, ranks):
                return boundaries(job, ranks, self._flags)
            case "held", (job, ranks):
                return held_here(job, self._flags, ranks)
            case "begin" | "offer" | "portion", _:
                return getattr(self._sender, method)(*words)
            case "open", (replace, portion_bytes):
                self._receiver = Receiver(self._flags, replace=replace, portion_bytes=portion_bytes)
                return None
            case "receive" | "put" | "publish" | "abandon", _ if self._receiver is not None:
                return getattr(self._receiver, method)(*words)
            case _:
                raise RemoteProtocolError(f"{method} is not possible")


class Ends:
    """Starts ends beside an agent; one may be started before it is needed.

    Parameters
    ----------
    config, directory, log
        How to connect, the agent's directory, and the file for errors.
    """

    def __init__(self, config: Config, directory: Path, log: Path) -> None:
        self._config, self._directory, self._log = config, directory, log
        #: A process that waits for its order. It ends with the agent.
        self._standby: subprocess.Popen[bytes] | None = None
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def stand_by(self) -> None:
        """Start a process for the next channel, unless one waits. Raise ``OSError`` if that is impossible."""
        if self._standby is not None and self._standby.poll() is None:
            return
        with self._log.open("ab") as errors:
            self._standby = subprocess.Popen(
                [sys.executable, "-m", "gpuslice.nodes.end_process"],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )

    def start(self, channel: str) -> None:
        """Start an end for that channel, in place of one that is there. Raise as ``stand_by``."""
        self._started = {one: process for one, process in self._started.items() if process.poll() is None}
        if (former := self._started.pop(channel, None)) is not None:
            former.kill()  # else it would keep the slots of the snapshot that it received
            former.wait()
        self.stand_by()
        process, self._standby = self._standby, None
        assert process is not None
        self._started[channel] = process
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(msgspec.json.encode(Order(channel, self._config, str(self._directory))))
        threading.Thread(target=process.wait, daemon=True).start()  # or it would stay a zombie


def serve(order: Order) -> None:
    """Answer calls until the caller is gone."""
    ours = {"socket": rank_endpoint(Path(order.directory))}  # tells the jobs of schedulers apart
    served = End({} if order.channel.startswith(OF_NONE) else ours)
    calls: SimpleQueue[Call] = SimpleQueue()
    results: SimpleQueue[Result] = SimpleQueue()

    done = os.eventfd(0, os.EFD_NONBLOCK)

    def work() -> None:
        while True:
            results.put(_result(served, calls.get()))
            os.eventfd_write(done, 1)

    threading.Thread(target=work, daemon=True).start()
    asks = caller(order.channel)
    with Line(order.config, end(order.channel, order.config.name)) as line:
        line.send(asks, Ready())
        missing_s = 0.0
        while True:
            heard = line.receive(_LOOK_AGAIN_S, done)
            if line.was_broken():
                line.send(asks, Ready())  # calls and results may be lost
            with suppress(BlockingIOError):
                os.eventfd_read(done)
            while not results.empty():
                line.send(asks, results.get())
            if heard is None:
                missing_s = 0.0
                line.send(asks, None)  # whether it is still there
            elif heard.message is None:
                missing_s = missing_s or time.monotonic()
                if time.monotonic() - missing_s >= _GONE_S:
                    return
                time.sleep(_ASK_AGAIN_S)  # its connection may have broken, and return at once
                line.send(asks, None)
            elif isinstance(heard.message, Call):
                calls.put(heard.message)


def _result(served: End, call: Call) -> Result:
    try:
        return Result(call.number, served.answer(call.method, call.words))
    except GpusliceError as error:
        return Result(call.number, None, type(error).__name__, error.message, error.remedy)
    except Exception as error:  # noqa: BLE001 - the other end must hear of it
        said = f"{type(error).__name__}: {error}"
        return Result(call.number, None, "EnvironmentUnusableError", said, "see the agent's log there")


if __name__ == "__main__":
    try:
        if order := sys.stdin.buffer.read():  # else its agent has ended
            serve(msgspec.json.decode(order, type=Order))
    except GpusliceError as error:
        sys.stderr.write(error.lines)
        sys.exit(error.exit_code)
