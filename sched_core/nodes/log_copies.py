"""Copies of jobs' output on other nodes, in the scheduler's own logs, while the jobs run.

The scheduler keeps in ``JOB.copied`` how much of which node's files it has; an agent continues from there. If
the scheduler is killed between two writes, a part of the output may be there twice.
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
    """The scheduler's copies of what jobs print on other nodes.

    Parameters
    ----------
    log
        The file of a job and a stream, ``copied`` among them.
    """

    def __init__(self, log: Callable[[str, str], Path]) -> None:
        self._log = log

    def copied(self, job: str, node: str) -> tuple[int, int]:
        """Return how many bytes of the job's output and of its errors were copied from ``node``."""
        known = self._known(job)
        out, err = (known.get(f"{node} {stream}", 0) for stream in _STREAMS)
        return out, err

    def store(self, node: str, printed: Printed) -> int:
        """Append output that ``node`` has sent, if it is new. Return how much of that file is here.

        Output that cannot be written, because the disk is full for instance, is left out, and our log says
        so.
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
    """A file's progress: the bytes sent, the bytes stored, and its size when its command ended."""

    path: Path
    sent: int
    stored: int
    end: int | None = None


class LogTails:
    """The agent's side of log copies: sends new output, one part of each file at a time.

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
        """Send what ``job`` prints after the ``copied`` part."""
        self._tails[job] = {
            stream: _Tail(self._log(job, stream), done, done)
            for stream, done in zip(_STREAMS, copied, strict=True)
        }

    def stored(self, job: str, stream: Stream, end: int) -> None:
        """Note that a part has been stored, and send the next one."""
        if (tail := self._tails.get(job, {}).get(stream)) is not None:
            tail.sent = tail.stored = end
            self._send_next(job, stream, tail)

    def send(self) -> None:
        """Send new output."""
        for job, tails in self._tails.items():
            for stream, tail in tails.items():
                if tail.sent == tail.stored:
                    self._send_next(job, stream, tail)

    def drained(self, job: str) -> bool:
        """Return True if all output is stored that the ended ``job`` had printed at the first call.

        Then no more of it is sent: processes that the job left behind may print for ever.
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
