"""The process of a node's agent: ``python -m gpuslice.nodes.agent_process DIRECTORY``.

It detaches from its parent, reads its configuration in ``DIRECTORY``, and serves until it is told to leave.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

import msgspec

from gpuslice import config
from gpuslice.errors import GpusliceError

from .plan import Config

CONFIG, LOG = "agent.json", "agent.log"
#: Settings of the node that override those of a job submitted elsewhere.
_OWN = ("ramdisk_limit", "spill_dir", "spill_limit")


def main(directory: Path) -> None:
    """Become the agent in ``directory``."""
    if os.fork():
        os._exit(0)
    # Late, after the fork: no thread of libzmq is to be left behind.
    from gpuslice.sched_core.nodes.curve import KeyPair
    from gpuslice.sched_core.nodes.node_agent import NodeAgent

    known = msgspec.json.decode((directory / CONFIG).read_bytes(), type=Config)
    keys = KeyPair(known.public.encode(), known.secret.encode())
    receiving, sending = os.pipe()
    signal.signal(signal.SIGTERM, lambda number, frame: os.write(sending, b"."))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with NodeAgent(
        known.name,
        directory,
        known.endpoint,
        known.scheduler.encode(),
        keys,
        logs=known.logs,
        environ=_environ(known),
    ) as agent:
        if agent.run(receiving):
            _discard(directory)
            (directory / CONFIG).unlink(missing_ok=True)


def _environ(known: Config) -> dict[str, str]:
    """Return the variables that every job of this node gets."""
    settings = config.load()
    # Always the RAM disk: the one in the job's settings is on another node.
    own = {config.variable("ramdisk_dir"): settings.ramdisk_dir}
    own |= {config.variable(name): value for name in _OWN if (value := getattr(settings, name))}
    if known.gpus:
        from gpuslice.kernels.nvml import read_driver
        from gpuslice.launch.visible_gpus import VISIBLE, all_visible

        gpus = all_visible([gpu.index for gpu in read_driver().gpus], os.environ.get(VISIBLE))
        own |= {config.variable("visible_gpus"): gpus, VISIBLE: gpus} if gpus else {}
    return own


def _discard(directory: Path) -> None:
    """Remove from the RAM disk what no job can continue from."""
    from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk

    try:
        RamDisk.from_settings(config.load()).discard(os.path.realpath(directory))
    except GpusliceError as error:
        sys.stderr.write(f"gpuslice: snapshots of ended jobs stay in the RAM disk: {error}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
