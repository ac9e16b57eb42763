"""The agent of another node for tests, as a process of its own: NAME DIRECTORY ENDPOINT KEYS [LOCKS]."""

from __future__ import annotations

import sys
from pathlib import Path

from gpuslice.sched_core.nodes.curve import client_keys
from gpuslice.sched_core.nodes.node_agent import NodeAgent

name, directory, endpoint, keys, *locks = sys.argv[1:]
scheduler, own = client_keys(Path(keys))
environ = {"NODE": name} | ({"RANK_LOCKS": locks[0]} if locks else {})
with NodeAgent(name, Path(directory), endpoint, scheduler, own, environ=environ) as agent:
    agent.run()
