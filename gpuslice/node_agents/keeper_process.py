"""The process that keeps an agent alive without Ray: ``python -m ...keeper_process DIRECTORY``.

It reads what the agent is to be told from stdin, and keeps it in its memory alone. It ends when the agent was
told to leave, or by SIGTERM, which leaves the agent alone.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time

#: Exit code of an agent that was told to leave.
LEFT = 0
_TRY_AGAIN_S = 5.0
#: An agent that ends sooner is not started again at once.
_SOON_S = 2.0


def main(directory: str) -> None:
    """Start the agent, again and again until it was told to leave."""
    told = sys.stdin.buffer.read()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    while True:
        began_s = time.monotonic()
        try:
            agent = subprocess.Popen(
                [sys.executable, "-m", "gpuslice.node_agents.agent_process", directory, "-"],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
            agent.communicate(told)
        except OSError as error:  # what keeps it from being started (memory, processes) may pass
            sys.stderr.write(f"gpuslice: the agent in {directory} did not start: {error}\n")
        else:
            if agent.returncode == LEFT:
                return
        if time.monotonic() - began_s < _SOON_S:
            time.sleep(_TRY_AGAIN_S)


if __name__ == "__main__":
    main(sys.argv[1])
