"""Transfers of states to the nodes where their jobs continue: one process each, beside the scheduler."""

from __future__ import annotations

import json
import os
import select
import struct
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import IO, NamedTuple

from gpuslice.errors import EnvironmentUnusableError, StateGoneError

from .processes import watch

#: Most bytes of the command's output that are read for the reason of a failure.
_SAID_BYTES = 4096
#: Exit code of the command if the only problem is a node that cannot be reached now.
UNREACHABLE = EnvironmentUnusableError.exit_code
#: Exit code of the command if no node that can be reached has the state.
GONE = StateGoneError.exit_code
#: The command that brings the newest snapshot of a job to other nodes: its name, from which node each rank's
#: comes, as far as anybody knows, and where it goes.
Command = Callable[[str, Sequence[str], Sequence[str]], Sequence[str]]
#: Called with "" when a state has arrived, or with the reason of a failure; at once if it cannot be sent.
Done = Callable[[str], object]
#: Called with the reason why a state is still being transferred.
Waiting = Callable[[str], object]


#: How far a transfer has come, at the beginning of its stdout: bytes that have arrived, and of all.
_PROGRESS = struct.Struct("<QQ")


def tell_progress(file: int, arrived: int, total: int) -> None:
    """Write how far a transfer has come to ``file``, the stdout that ``Transfers`` gave to its process."""
    with suppress(OSError):  # started by hand: nobody reads it
        os.pwrite(file, _PROGRESS.pack(arrived, total), 0)


class _Wish(NamedTuple):
    job: str
    sources: Sequence[str]
    targets: Sequence[str]
    done: Done
    waiting: Waiting | None
    gone: Done | None


class _Process(NamedTuple):
    popen: subprocess.Popen[bytes]
    errors: IO[bytes]
    progress: IO[bytes]

    def kill(self) -> None:
        """Kill the process, and wait for it."""
        self.popen.kill()
        self.popen.wait()
        self.errors.close()
        self.progress.close()


class _Transfer(NamedTuple):
    wish: _Wish
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    progress: IO[bytes]


def _spawn(words: Sequence[str], stdin: int) -> _Process:
    """Start the process of a transfer. Raise ``OSError`` if that is impossible."""
    with ExitStack() as undo:
        errors, progress = (
            undo.enter_context(os.fdopen(os.memfd_create(name), "r+b")) for name in ("errors", "progress")
        )
        process = subprocess.Popen(words, stdin=stdin, stdout=progress, stderr=errors, start_new_session=True)
        undo.pop_all()
    return _Process(process, errors, progress)


class Transfers:
    """The transfers of job states between nodes that are under way; one at a time for each job.

    Parameters
    ----------
    command
        What brings a state to other nodes.
    standby
        The command of a process that can be started before it is needed. It reads from stdin the words of
        ``command``, a JSON array, and does what that would. Empty: there is none.
    """

    def __init__(self, command: Command, standby: Sequence[str] = ()) -> None:
        self._command, self._standby_words = command, standby
        #: A process that waits for its words.
        self._standby: _Process | None = None
        self._transfers: dict[int, _Transfer] = {}
        self._queued: list[_Wish] = []
        self._watched = select.epoll()

    def fileno(self) -> int:
        """Return a descriptor that is readable when a transfer has ended. Then call ``reap``."""
        return self._watched.fileno()

    def begin(
        self,
        job: str,
        sources: Sequence[str],
        targets: Sequence[str],
        done: Done,
        waiting: Waiting | None = None,
        gone: Done | None = None,
    ) -> None:
        """Bring the state of each rank of ``job`` to its node, after an earlier transfer; then call ``done``.

        Parameters
        ----------
        sources, targets
            By rank: a node that should have the state, and where it goes.
        waiting
            If given, it is tried again, and this called, for as long as a node cannot be reached.
        gone
            If given, called instead of ``done`` if no node that can be reached has the state.
        """
        self._queued.append(_Wish(job, sources, targets, done, waiting, gone))
        self._begin_queued()

    def stand_by(self) -> None:
        """Start a process for the next transfer, unless one waits."""
        if self._standby_words and (self._standby is None or self._standby.popen.poll() is not None):
            self._end_standby()
            with suppress(OSError):  # it is started when it is needed
                self._standby = _spawn(self._standby_words, subprocess.PIPE)

    def _end_standby(self) -> None:
        if self._standby is not None:
            standby, self._standby = self._standby, None
            assert standby.popen.stdin is not None
            standby.popen.stdin.close()
            standby.kill()

    def under_way(self, job: str) -> bool:
        """Return True if the state of ``job`` is being transferred, or is queued."""
        return any(one.wish.job == job for one in self._transfers.values()) or self._is_queued(job)

    def progress(self, job: str) -> tuple[int, int] | None:
        """Return the bytes of the state of ``job`` that have arrived, and of all. None: not known."""
        for one in self._transfers.values():
            if one.wish.job == job:
                said = os.pread(one.progress.fileno(), _PROGRESS.size, 0)
                if len(said) == _PROGRESS.size:
                    arrived, total = _PROGRESS.unpack(said)
                    return min(arrived, total), total
        return None

    def cancel(self, job: str) -> None:
        """Cancel the transfer of ``job``. ``done`` is called as for every failure."""
        for descriptor, one in self._transfers.items():
            if one.wish.job == job:
                one.process.kill()
                # It may have ended by itself, as there is a node that it cannot reach: not to be tried again.
                self._transfers[descriptor] = one._replace(wish=one.wish._replace(waiting=None))
        given_up = [wish for wish in self._queued if wish.job == job]
        self._queued = [wish for wish in self._queued if wish.job != job]
        for wish in given_up:
            wish.done("it was given up")

    def reap(self) -> None:
        """Report transfers that have ended."""
        for descriptor, _ in self._watched.poll(0):
            wish, code, said = self._close(descriptor)
            if code == UNREACHABLE and wish.waiting is not None:
                self._queued.insert(0, wish)
                wish.waiting(said)
            elif code == GONE and wish.gone is not None:
                wish.gone(said)
            else:
                wish.done("" if code == 0 else said or f"exit code {code}")
        self._begin_queued()

    def close(self) -> None:
        """End all transfers without a report."""
        self._queued.clear()
        self._end_standby()
        for descriptor, one in list(self._transfers.items()):
            one.process.kill()
            self._close(descriptor)
        self._watched.close()

    def _is_queued(self, job: str) -> bool:
        return any(wish.job == job for wish in self._queued)

    def _begin_queued(self) -> None:
        for wish in list(self._queued):
            if wish not in self._queued:
                continue  # cancelled by a ``done`` that was just called
            if not any(one.wish.job == wish.job for one in self._transfers.values()):
                self._queued.remove(wish)
                try:
                    self._start(wish)
                except OSError as error:
                    wish.done(str(error))

    def _start(self, wish: _Wish) -> None:
        words = list(self._command(wish.job, wish.sources, wish.targets))
        found = self._tell_standby(words) or _spawn(words, subprocess.DEVNULL)
        try:
            descriptor = watch(found.popen)
        except OSError:
            found.kill()
            raise
        self._transfers[descriptor] = _Transfer(wish, *found)
        self._watched.register(descriptor, select.EPOLLIN)

    def _tell_standby(self, words: Sequence[str]) -> _Process | None:
        """Have the process that waits do ``words``, and return it. Return None if there is none."""
        if self._standby is None or self._standby.popen.poll() is not None:
            return None
        standby, self._standby = self._standby, None
        assert standby.popen.stdin is not None
        with suppress(BrokenPipeError), standby.popen.stdin as pipe:
            pipe.write(json.dumps(words).encode())
        return standby

    def _close(self, descriptor: int) -> tuple[_Wish, int, str]:
        wish, process, errors, progress = self._transfers.pop(descriptor)
        os.close(descriptor)
        code = process.wait()
        with errors, progress:
            errors.seek(0)
            said = errors.read(_SAID_BYTES).decode(errors="replace").strip()
        return wish, code, said
