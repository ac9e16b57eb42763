"""The process of a node's agent: ``python -m gpuslice.node_agents.agent_process DIRECTORY [-]``.

It detaches from its parent, reads its configuration in ``DIRECTORY``, and serves until it is told to leave.
With ``-`` it stays its parent's child, and reads its configuration from stdin.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from gpuslice import config
from gpuslice.errors import GpusliceError
from gpuslice.nodes.device_users import UserLook, UserWatch
from gpuslice.nodes.leftovers import forget
from gpuslice.nodes.plan import Config
from gpuslice.sched_core.jobs.program import Program

from . import preflight
from .own_terms import problem, translated

if TYPE_CHECKING:
    from gpuslice.nodes.end_process import Ends

CONFIG, LOG = "agent.json", "agent.log"
#: Exit code of an agent that was not told to leave.
_STOPPED = 3
#: Settings of the node that override those of a job submitted elsewhere.
_OWN = ("ramdisk_limit", "spill_dir", "spill_limit")


def main(directory: Path, *, by_stdin: bool = False) -> None:
    """Become the agent in ``directory``. If told ``by_stdin``, exit with 0 only if it was told to leave."""
    if not by_stdin and os.fork():
        os._exit(0)
    # Late, after the fork: no thread of libzmq is to be left behind.
    from gpuslice.sched_core.nodes.curve import KeyPair
    from gpuslice.sched_core.nodes.node_agent import NodeAgent

    told = sys.stdin.buffer.read() if by_stdin else (directory / CONFIG).read_bytes()
    known = msgspec.json.decode(told, type=Config)
    keys = KeyPair(known.public.encode(), known.secret.encode())
    ends = cache(partial(_ends, known, directory))
    present = preflight.PresentFacts(known.devices, known.working_directory)
    look = UserLook(known.devices, directory)
    watch = UserWatch(look)
    if look.devices:
        watch.start()
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
        adapt=_adapted,
        serve=lambda channel: _start_end(lambda: ends().start(channel)),
        stand_by=lambda: _start_end(lambda: ends().stand_by()),
        forget=partial(forget, directory),
        facts=lambda: msgspec.json.encode(replace(present.now(), users=watch.users)),
    ) as agent:
        if agent.run(receiving):
            _discard(directory)
            (directory / CONFIG).unlink(missing_ok=True)
        elif by_stdin:
            sys.exit(_STOPPED)


def _ends(known: Config, directory: Path) -> Ends:
    from gpuslice.nodes.end_process import Ends

    return Ends(known, directory, directory / LOG)


def _adapted(program: Program) -> tuple[Program, str]:
    """Return a job's program in this node's own terms, and why it cannot be started here."""
    ours = translated(program)
    return ours, problem(ours)


def _start_end(start: Callable[[], object]) -> None:
    """Start a process that sends or receives snapshots."""
    try:
        start()
    except OSError as error:  # who waits for it will say that it did not come
        sys.stderr.write(f"gpuslice: no process for a snapshot could be started: {error}\n")


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
    main(Path(sys.argv[1]), by_stdin=sys.argv[2:] == ["-"])
