"""``gpuslice adopt``: take a process that gpuslice did not start off its GPUs, and bring it back."""

from __future__ import annotations

import json
import os
from typing import Annotated
from uuid import UUID

from gpuslice.errors import UsageError

from .declare import Argument, Option
from .options import Json


def command(
    pid: Annotated[int, Argument(metavar="PID", help="A process of yours that uses CUDA.")],
    suspend: Annotated[
        bool, Option("--suspend", help="Take the process off its GPUs, CUDA context included.")
    ] = False,
    resume: Annotated[bool, Option("--resume", help="Bring the process back.")] = False,
    to: Annotated[
        str | None,
        Option(
            "--to",
            metavar="cuda:0=cuda:1",
            help="With --resume: from which GPU to which; the two change places.",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        Option(
            "--timeout",
            metavar="SECONDS",
            help="How long the process may take to become idle; 60 by default.",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Suspend, resume or look at any process that uses CUDA.

    Without an option, show its state. NVIDIA's driver keeps the state, so anybody may resume the process.

    Exits with 0; with 2 for no such process, or one that is suspended already or not at all; with 3 if
    the driver is missing, too old, or refuses, or if the GPU lacks memory. A process that cannot be
    suspended goes on as it was; one for which the GPU lacks memory stays suspended.
    """
    from gpuslice.driver_route import adopted
    from gpuslice.kernels.driver import Process

    if suspend and resume:
        raise UsageError("both --suspend and --resume are given", "choose one of the two")
    if to is not None and not resume:
        raise UsageError("--to is given without --resume", "a process moves when it is resumed: add --resume")
    if timeout is not None and not (suspend and 0 < timeout < 86_400):
        raise UsageError(
            "--timeout needs --suspend, and seconds of at most a day",
            "give both, such as --suspend --timeout 60",
        )
    adopted.check_pid(pid)
    process = Process(pid)
    if suspend:
        adopted.suspend(process, adopted.LOCK_TIMEOUT_S if timeout is None else timeout)
    elif resume:
        adopted.resume(process, None if to is None else _moves(to))
    state = process.state.name.lower()
    print(json.dumps({"pid": pid, "state": state}) if as_json else f"process {pid}: {state}")
    return 0


def _moves(to: str) -> dict[UUID, UUID]:
    from gpuslice.driver_route import adopted
    from gpuslice.kernels.nvml import read_driver
    from gpuslice.types import DeviceName

    ends = [DeviceName.parse(word) for word in to.split("=")]
    if len(ends) != 2 or any(end.kind != "cuda" or end.index is None for end in ends):
        raise UsageError(
            f"--to {to} is not of the form cuda:0=cuda:1", "name the GPU it was on, and the new one"
        )
    source, target = (end.index or 0 for end in ends)
    return adopted.moves_to([target], [source], read_driver(), os.environ)
