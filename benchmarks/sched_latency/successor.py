"""A parked rank that expects one handover after the other, and notes when it has the predecessor's last word.

successor.py DIRECTORY ROUNDS

Opens its door in DIRECTORY as an agent does. Prints a line before each handover, and one after it: what
`time.monotonic_ns` said when it had the device.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpuslice.agent.handover import Coming, Handovers
from gpuslice.agent.orders import Orders, Phase
from gpuslice.checkpoint.switch.swap_protocol import SOCKET
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.wire import Expect

DEVICE, PREDECESSOR, JOB = "cpu:0", "predecessor", "successor"


def main(directory: Path, rounds: int) -> None:
    """Wait for ``rounds`` devices."""
    orders = Orders(BoundaryCounter(), lambda: None)
    runtime: Any = SimpleNamespace(
        settings=SimpleNamespace(job=JOB),
        store=SimpleNamespace(directory=directory),
        device=SimpleNamespace(name=DEVICE, duplex=False),
    )
    handovers = Handovers(runtime, orders, lambda messages: None)
    for epoch in range(1, rounds + 1):
        orders.phase = Phase.PARKED
        orders.expect(Expect(epoch=epoch, device=DEVICE, predecessor=PREDECESSOR))
        print("waits", flush=True)
        coming = handovers.await_order()
        now_ns = time.monotonic_ns()
        assert isinstance(coming, Coming), coming
        print(now_ns, flush=True)
        orders.run_on()
        assert not (directory / SOCKET).exists()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
