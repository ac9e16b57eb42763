"""The agent of another node, as a process of its own: NAME DIRECTORY ENDPOINT KEYS [VARIABLE=VALUE...].

``LOGS`` is what the logs of its scheduler are known by.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gpuslice.sched_core.nodes.curve import client_keys
from gpuslice.sched_core.nodes.node_agent import NodeAgent

name, directory, endpoint, keys, *variables = sys.argv[1:]
scheduler, own = client_keys(Path(keys))
environ = {"NODE": name, **dict(variable.split("=", 1) for variable in variables)}
logs = environ.pop("LOGS", "")
with NodeAgent(name, Path(directory), endpoint, scheduler, own, logs=logs, environ=environ) as agent:
    agent.run()
