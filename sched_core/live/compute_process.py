"""Computations for a policy that take too long for the scheduler, in a process beside it.

A process and not a thread: it can be ended, it cannot take the scheduler along, and while it works the
scheduler has its interpreter for itself.
"""

from __future__ import annotations

import os
import subprocess
import sys

from gpuslice.sched_core.lifecycle.events import Compute, Computed
from gpuslice.sched_core.nodes.processes import watch
from gpuslice.sched_core.policy import Task

#: The niceness of the process: jobs that train come first.
_NICENESS = 10


class Computing:
    """The processes that compute answers for a policy (``View.compute``); usually at most one."""

    def __init__(self) -> None:
        self._processes: dict[int, tuple[Compute, subprocess.Popen[bytes], int]] = {}

    def begin(self, command: Compute) -> int:
        """Start a computation. Return a descriptor that is readable when the answer is there.

        Raises
        ------
        OSError
            If the process cannot be started.
        """
        argument, answer = (os.memfd_create(name) for name in ("argument", "answer"))
        try:
            with os.fdopen(argument, "wb") as file:
                file.write(command.task.argument)
                file.flush()
                file.seek(0)
                process = subprocess.Popen(
                    [sys.executable, "-m", __name__, command.task.function, str(answer)],
                    stdin=file,
                    stdout=2,  # what the function prints is not the answer
                    pass_fds=[answer],
                    start_new_session=True,
                )
            descriptor = watch(process)
        except BaseException:
            os.close(answer)
            raise
        self._processes[descriptor] = command, process, answer
        return descriptor

    def reap(self, descriptors: set[int]) -> list[Computed]:
        """Return the answers of the finished computations among ``descriptors``, and close these."""
        return [self._answer(descriptor) for descriptor in descriptors & self._processes.keys()]

    def _answer(self, descriptor: int) -> Computed:
        command, process, answer = self._processes.pop(descriptor)
        os.close(descriptor)
        code = process.wait()
        with os.fdopen(answer, "rb") as file:
            file.seek(0)
            found = file.read()
        if code:
            error = f"{command.task.function} ended with exit code {code}; scheduler.log says more"
            return Computed(command.number, error=error)
        return Computed(command.number, found)

    def close(self) -> None:
        """End all computations. Their answers are dropped."""
        for descriptor, (_, process, _) in list(self._processes.items()):
            process.kill()
            self._answer(descriptor)


def main(function: str, answer: str) -> None:
    """Compute in this process: the argument is on stdin, the answer goes to descriptor ``answer``."""
    os.nice(_NICENESS)
    with open(int(answer), "wb") as file:
        file.write(Task(function, sys.stdin.buffer.read()).compute())


if __name__ == "__main__":
    main(*sys.argv[1:])
