"""``gpuslice submit``: hand a training job in."""

from __future__ import annotations

import os
import sys
from enum import Enum
from typing import Annotated

import msgspec

from gpuslice import config
from gpuslice.errors import UsageError

from .client_commands import connect
from .declare import Option
from .options import CheckpointEvery, Json, Route, StateDir, Words


class OnTimeout(Enum):
    """What is done with a job that reaches no boundary in time."""

    LEAVE = "leave"
    KILL = "kill"


def command(
    words: Words = None,
    name: Annotated[str | None, Option(help="The job's id; else the script's name and a number.")] = None,
    devices: Annotated[
        str, Option(metavar="K[:M]", help="Devices, one for each of its ranks; up to M if it can grow.")
    ] = "1",
    tenant: Annotated[str, Option(metavar="T", help="Whose it is.")] = "",
    app: Annotated[
        str, Option(metavar="A", help="Jobs of one app search for one model together (themis).")
    ] = "",
    weight: Annotated[float, Option(metavar="W", help="Its share, where the policy knows weights.")] = 1.0,
    max_restarts: Annotated[
        int, Option(metavar="R", help="Attempts after failures that are not the user's.")
    ] = 0,
    steps: Annotated[
        int, Option(metavar="N", help="Optimizer steps it has, if known: for its progress.")
    ] = 0,
    duration: Annotated[
        str | None, Option(metavar="40m", help="How long it trains on its devices, as far as you know.")
    ] = None,
    max_steps: Annotated[int, Option(metavar="N", help="End it, well, after N optimizer steps.")] = 0,
    memory: Annotated[
        str,
        Option(metavar="3G[:6G]", help="Limit on each device; over it, again with twice as much, up to 6G."),
    ] = "",
    trial: Annotated[
        bool, Option("--trial", help="Try it first, ahead of all others, so that it fails early if at all.")
    ] = False,
    trial_batches: Annotated[int, Option(metavar="N", help="Mini-batches of a trial.")] = 5,
    deadline: Annotated[
        str | None, Option(metavar="2h", help="By when it is to be through, from now.")
    ] = None,
    guaranteed: Annotated[
        bool,
        Option("--guaranteed", help="Refuse it if chronus cannot guarantee that (--steps or --duration)."),
    ] = False,
    boundary_timeout: Annotated[
        str, Option(metavar="60s", help="Report it if it reaches no boundary for so long (or: never).")
    ] = "60s",
    on_boundary_timeout: Annotated[OnTimeout, Option(help="What else to do with it then.")] = OnTimeout.LEAVE,
    grace: Annotated[
        str | None,
        Option(
            metavar="30s",
            help="Time to end when told to, before it is killed; else up's.",
        ),
    ] = None,
    checkpoint_every: CheckpointEvery = None,
    variables: Annotated[
        list[str] | None, Option("--env", metavar="K=V", help="A variable for the job.")
    ] = None,
    route: Route = None,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Hand a job in, unmodified, and print its id.

    When its turn comes, it runs in this directory and with this environment.
    """
    environ = dict(os.environ)
    for setting in variables or []:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise UsageError(f"--env {setting} is not KEY=VALUE", "write for instance --env LR=0.1")
        environ[key] = value
    least_devices, most_devices = parse_counts(devices)
    limit, _, most = memory.partition(":")
    timeout_s = 0.0 if boundary_timeout == "never" else config.parse_duration(boundary_timeout)
    if guaranteed and sys.stderr.isatty():
        sys.stderr.write("gpuslice: waiting until it is known whether its deadline can be guaranteed\n")
    with connect(state_dir) as client:
        job = client.submit(
            words or [],
            name=name,
            devices=least_devices,
            most_devices=most_devices,
            tenant=tenant,
            app=app,
            weight=weight,
            max_restarts=max_restarts,
            steps=steps,
            max_steps=max_steps,
            device_memory_bytes=config.parse_size(limit) if limit else 0,
            most_device_memory_bytes=config.parse_size(most) if most else 0,
            expected_s=0.0 if duration is None else config.parse_duration(duration),
            trial_batches=trial_batches if trial else 0,
            deadline_s=0.0 if deadline is None else config.parse_duration(deadline),
            guaranteed=guaranteed,
            boundary_timeout_s=timeout_s,
            on_boundary_timeout=on_boundary_timeout.value,
            grace_s=None if grace is None else config.parse_duration(grace),
            environ=environ,
            route=route,
            checkpoint_every=checkpoint_every,
        )
    print(msgspec.json.encode({"id": job}).decode() if as_json else job)


def parse_counts(text: str) -> tuple[int, int]:
    """How many devices: ``2`` are 2 and 0, ``1:4`` are 1 and 4."""
    least, colon, most = text.partition(":")
    if not all(
        part.isascii() and part.isdigit() and len(part) < 10
        for part in ((least, most) if colon else (least,))
    ):
        raise UsageError(f"--devices {text[:60]} is no number of devices", "write for instance 2, or 1:4")
    if colon and int(most) < int(least):
        raise UsageError(f"--devices {text} is not possible", "write the smaller number first: 1:4")
    return int(least), int(most) if colon else 0
