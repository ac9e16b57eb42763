"""The named actor of a node: keeps the scheduler's agent alive there, and reserves its devices from Ray.

The agent is a process of its own and no child of Ray's, because Ray ends the children of an actor with it. A
restarted actor finds the agent, and an agent that has died is started again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.files import private_directory, replace_file
from gpuslice.nodes.plan import Config
from gpuslice.sched_core.nodes.endpoint import LOCK

from .agent_process import CONFIG, LOG
from .reach import problem, unreachable

_LOOK_AGAIN_S = 0.5
#: Wait before another attempt to start the agent.
_TRY_AGAIN_S = 5.0
#: Longest wait for an agent to leave, so that another can take its place.
_LEAVE_S = 10.0
#: Longest start of an agent.
_COME_S = 60.0


class AgentKeeper:
    """The actor that keeps a node's agent.

    Parameters
    ----------
    directory
        The agent's, on its node; empty: it keeps nothing but Ray's resources.
    config
        What the agent is told (``plan.Config``, as JSON).
    """

    def __init__(self, directory: str, config: bytes) -> None:
        self._directory = Path(directory) if directory else None
        self._config = config
        if self._directory is None:
            return
        private_directory(self._directory, option="--state-dir", parents=True)
        path = self._directory / CONFIG
        if path.exists() and path.read_bytes() != config:
            self._end_agent()
        replace_file(path, config)
        self._begin_agent()
        threading.Thread(target=self._watch, daemon=True).start()

    def ready(self) -> int:
        """Return the agent's process id; 0 if there is no agent.

        Raises
        ------
        EnvironmentUnusableError
            If this node cannot reach the scheduler.
        """
        if self._directory is None:
            return 0
        endpoint = msgspec.json.decode(self._config, type=Config).endpoint
        if why := problem(endpoint):
            raise unreachable(why)
        return running(self._directory)

    def leave(self) -> None:
        """End the agent, if it is left, and what it was told; then this actor keeps nothing.

        Raises
        ------
        EnvironmentUnusableError
            If it does not end.
        """
        if self._directory is not None:
            (self._directory / CONFIG).unlink(missing_ok=True)
            self._end_agent()

    def _watch(self) -> None:
        assert self._directory is not None
        while (self._directory / CONFIG).exists():  # it removes it when it has been told to leave
            # What keeps it from being started (memory, processes) may pass: it is in the actor's log.
            try:
                self._begin_agent()
            except (OSError, subprocess.CalledProcessError) as error:
                sys.stderr.write(f"gpuslice: the agent in {self._directory} did not start: {error}\n")
                time.sleep(_TRY_AGAIN_S)
            time.sleep(_LOOK_AGAIN_S)

    def _begin_agent(self) -> None:
        """Start the agent, unless it runs."""
        assert self._directory is not None
        if running(self._directory):
            return
        ends_s = time.monotonic() + _COME_S
        with (self._directory / LOG).open("ab") as log:
            # Returns when the agent has detached from its parent.
            subprocess.run(
                [sys.executable, "-m", "gpuslice.node_agents.agent_process", str(self._directory)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                check=True,
            )
        while not running(self._directory) and time.monotonic() < ends_s:
            time.sleep(_LOOK_AGAIN_S / 10)

    def _end_agent(self) -> None:
        """Make an agent with another configuration leave its jobs to a new one."""
        assert self._directory is not None
        ends_s = time.monotonic() + _LEAVE_S
        if pid := running(self._directory):
            os.kill(pid, signal.SIGTERM)
        while running(self._directory):
            if time.monotonic() > ends_s:
                raise EnvironmentUnusableError(
                    f"the agent in {self._directory} does not end", "end its process, and try again"
                )
            time.sleep(_LOOK_AGAIN_S / 10)


def running(directory: Path, file: str = LOCK) -> int:
    """Return the process id that ``file`` in ``directory`` names, the agent's; 0 if it does not run."""
    try:
        pid = int((directory / file).read_text())
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return 0
    return pid if os.fsencode(directory) in words else 0
