"""What jobs print on other nodes, copied to the scheduler's own logs of them while they run.

The scheduler keeps in ``JOB.copied`` how much of which node's files it has; an agent goes on from there. Only
if the scheduler is killed between the two can a part of the output be there twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpuslice.files import replace_file

from .node_wire import Printed, Stream

_PART_BYTES = 256 << 10
_STREAMS: tuple[Stream, Stream] = ("out", "err")
_log = logging.getLogger(__name__)


class LogCopies:
    """The scheduler's end.

    Parameters
    ----------
    log
        The file of a job and a stream, ``copied`` among them.
    """

    def __init__(self, log: Callable[[str, str], Path]) -> None:
        self._log = log

    def copied(self, job: str, node: str) -> tuple[int, int]:
        """How much of ``job`` has been copied from ``node``: of its output, and of its errors."""
        known = self._known(job)
        out, err = (known.get(f"{node} {stream}", 0) for stream in _STREAMS)
        return out, err

    def store(self, node: str, printed: Printed) -> int:
        """Add what ``node`` has sent, unless it is here already; returns how much of that file is here.

        What cannot be written, because the disk is full for instance, is left out, with a word in our log.
        """
        known = self._known(printed.job)
        name = f"{node} {printed.stream}"
        end = printed.offset + len(printed.data)
        if end <= known.get(name, 0):
            return known[name]
        try:
            with self._log(printed.job, printed.stream).open("ab") as file:
                file.write(printed.data[max(0, known.get(name, 0) - printed.offset) :])
            replace_file(self._log(printed.job, "copied"), msgspec.json.encode({**known, name: end}))
        except OSError as error:
            _log.warning("what %s printed on %s is lost: %s", printed.job, node, error)
        return end

    def _known(self, job: str) -> dict[str, int]:
        try:
            return msgspec.json.decode(self._log(job, "copied").read_bytes(), type=dict[str, int])
        except FileNotFoundError:
            return {}
        except msgspec.DecodeError as error:
            _log.warning("%s is damaged, what %s printed is copied again: %s", job, job, error)
            return {}


@dataclass
class _Tail:
    """How far a file has been sent, how far of that was stored, and where it ended when its command did."""

    path: Path
    sent: int
    stored: int
    end: int | None = None


class LogTails:
    """The agent's end: sends what is new, one part of each file at a time.

    Parameters
    ----------
    log
        The file of a job and a stream.
    send
        Called with each part.
    """

    def __init__(self, log: Callable[[str, str], Path], send: Callable[[Printed], object]) -> None:
        self._log = log
        self._send = send
        self._tails: dict[str, dict[Stream, _Tail]] = {}

    def follow(self, job: str, copied: tuple[int, int]) -> None:
        """Send what ``job`` prints after what has been ``copied``."""
        self._tails[job] = {
            stream: _Tail(self._log(job, stream), done, done)
            for stream, done in zip(_STREAMS, copied, strict=True)
        }

    def stored(self, job: str, stream: Stream, end: int) -> None:
        """A part has been stored: the next may follow."""
        if (tail := self._tails.get(job, {}).get(stream)) is not None:
            tail.sent = tail.stored = end
            self._send_next(job, stream, tail)

    def send(self) -> None:
        """Send what is new."""
        for job, tails in self._tails.items():
            for stream, tail in tails.items():
                if tail.sent == tail.stored:
                    self._send_next(job, stream, tail)

    def drained(self, job: str) -> bool:
        """Whether all is stored that ``job``, which has ended, had printed when this was asked first.

        Nothing is sent of it any more then. What it left behind may print for ever.
        """
        tails = self._tails.get(job, {}).values()
        for tail in tails:
            tail.end = _size(tail.path) if tail.end is None else tail.end
        if all(tail.stored >= (tail.end or 0) for tail in tails):
            self._tails.pop(job, None)
            return True
        return False

    def __bool__(self) -> bool:
        return bool(self._tails)

    def _send_next(self, job: str, stream: Stream, tail: _Tail) -> None:
        if _size(tail.path) <= tail.stored:
            return
        with tail.path.open("rb") as file:
            file.seek(tail.stored)
            data = file.read(_PART_BYTES)
        tail.sent = tail.stored + len(data)
        self._send(Printed(job=job, stream=stream, offset=tail.stored, data=data))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
