"""NUMA nodes of the host: which one is next to a GPU, and how to get pages there.

A copy between a GPU and another socket's memory also goes through the link between the sockets. Linux takes a
page from the node of the processor that first touches it. So a thread that takes pages for a GPU runs on that
node meanwhile. Unlike a memory policy, this needs no right that a container may lack.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SYSTEM = Path("/sys")
_DRIVER = Path("/proc/driver/nvidia/gpus")


def node_of_gpu(uuid: str) -> int | None:
    """Return the NUMA node next to a GPU, given its UUID without ``GPU-``; None if unknown.

    The driver lists its GPUs by PCI address, and the kernel says to which node an address belongs.
    """
    with suppress(OSError, ValueError):
        for gpu in _DRIVER.iterdir():
            if uuid in (gpu / "information").read_text(encoding="ascii", errors="replace"):
                node = int((_SYSTEM / "bus/pci/devices" / gpu.name / "numa_node").read_text())
                return None if node < 0 else node  # a machine with one node may report -1
    return None


@contextmanager
def near(node: int | None) -> Iterator[None]:
    """Run the calling thread on a NUMA node inside the block, so that it takes pages from there.

    If the thread may not run on the node, nothing changes.
    """
    everywhere = os.sched_getaffinity(0)
    there = everywhere if node is None else everywhere & _processors(node)
    if not there or there == everywhere:
        yield
        return
    # The place of pages only affects speed. The cores may have been taken away since they were read.
    with suppress(OSError):
        os.sched_setaffinity(0, there)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, everywhere)


def _processors(node: int) -> set[int]:
    """Return the processors of a node, read from the form ``0-3,8``."""
    found: set[int] = set()
    with suppress(OSError, ValueError):
        text = (_SYSTEM / f"devices/system/node/node{node}/cpulist").read_text(encoding="ascii")
        for part in filter(None, text.strip().split(",")):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found
