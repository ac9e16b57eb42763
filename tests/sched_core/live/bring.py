"""Brings the snapshot of each rank of a job to its node, as Ray does: bring.py NODES JOB NODE...

``NODES`` is a file with the settings of each node that lives, by name; they are parts of this machine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gpuslice.errors import GpusliceError, StateGoneError
from gpuslice.nodes.messages import Held, Missing, decode, encode
from gpuslice.nodes.receiver import Receiver
from gpuslice.nodes.routes import boundaries, choose
from gpuslice.nodes.routes import decode as decode_boundaries
from gpuslice.nodes.sender import Sender


def main(file: str, job: str, *targets: str) -> None:
    nodes = json.loads(Path(file).read_text())
    held = {name: decode_boundaries(boundaries(job, len(targets), flags)) for name, flags in nodes.items()}
    routes = choose(held, targets)
    if routes is None:
        raise StateGoneError(f"no living node has a whole snapshot of {job}", "")
    for (source, target), ranks in routes.ways.items():
        sender, receiver = Sender(nodes[source]), Receiver(nodes[target], replace=True)
        held = decode(sender.begin(job, ranks, routes.boundary), Held)
        missing = decode(receiver.receive(*map(sender.offer, held.ranks)), Missing)
        for portion in map(encode, missing.portions):
            receiver.put(portion, sender.portion(portion))
        receiver.publish()


try:
    main(*sys.argv[1:])
except GpusliceError as error:
    sys.stderr.write(error.message)
    sys.exit(error.exit_code)
