"""Nodes of the host's memory: which one is next to a GPU, and having pages there.

A copy between a GPU and another socket's memory goes through the link between the sockets, too. Linux takes
a page from the node of the processor that first asks for it, so whoever takes pages for a GPU runs there
meanwhile; that needs no right that a container may lack, as setting a policy for memory does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SYSTEM = Path("/sys")
_DRIVER = Path("/proc/driver/nvidia/gpus")


def node_of_gpu(uuid: str) -> int | None:
    """The node next to a GPU, by its UUID without the prefix ``GPU-``; ``None`` where that is not known.

    The driver lists its GPUs by PCI address, and the kernel says to which node an address belongs.
    """
    with suppress(OSError, ValueError):
        for gpu in _DRIVER.iterdir():
            if uuid in (gpu / "information").read_text(encoding="ascii", errors="replace"):
                node = int((_SYSTEM / "bus/pci/devices" / gpu.name / "numa_node").read_text())
                return None if node < 0 else node  # where there is only one, it may be none
    return None


@contextmanager
def near(node: int | None) -> Iterator[None]:
    """Pages that the calling thread takes meanwhile are that node's, as long as it has some.

    Where the thread may not run there, they are where it may.
    """
    everywhere = os.sched_getaffinity(0)
    there = everywhere if node is None else everywhere & _processors(node)
    if not there or there == everywhere:
        yield
        return
    # Where the pages are only makes copies faster. The cores may have been taken away since they were read.
    with suppress(OSError):
        os.sched_setaffinity(0, there)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, everywhere)


def _processors(node: int) -> set[int]:
    """Those of a node, from the form ``0-3,8``."""
    found: set[int] = set()
    with suppress(OSError, ValueError):
        text = (_SYSTEM / f"devices/system/node/node{node}/cpulist").read_text(encoding="ascii")
        for part in filter(None, text.strip().split(",")):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found
