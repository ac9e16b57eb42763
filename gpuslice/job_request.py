"""What a user asks for with a job, spelled once: ``JobRequest``.

Each field is a keyword of ``Client.submit``, part of the message to the scheduler, and checked there. A field
with an ``Option`` is an option of ``gpuslice submit`` and a key of a ``job.toml``, too. How its text is read
follows from its type and from the unit in its name (``gpuslice/client/job_options.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

import msgspec

from gpuslice.errors import UsageError
from gpuslice.types import (
    ByteCount,
    Count,
    JobName,
    Label,
    OptionalRankCount,
    PathText,
    RankCount,
    Seconds,
    VariableName,
    Weight,
    Word,
)


class Option(NamedTuple):
    """How people write the value of a field, on a command line and in a ``job.toml``.

    Attributes
    ----------
    group
        The part of the help that has the option.
    metavar, help
        What stands for the value in the help, and what it means.
    name
        ``"max_steps"`` is ``--max-steps`` and the key ``max_steps``. Empty: the field's name, without a unit.
    most
        The field that a second number sets: ``1:4``.
    words
        Words that stand for a value.
    """

    group: str
    metavar: str
    help: str
    name: str = ""
    most: str = ""
    words: Mapping[str, float] = {}


_DEVICES = "Devices and memory"
_TIMES = "Steps and times"
_SHARES = "Order and shares"
_ENDS = "Failures and the end"
_COMMAND = "The command"


class JobRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a user asks for with a job.

    Attributes
    ----------
    name
        The id. Without one, the id is made of the script's name and a number.
    devices, most_devices
        How many devices the job has, all or nothing, and as many ranks. A script that takes its rank from its
        launcher is started by torchrun (docs/submit.md, Ranks). With a larger ``most_devices`` the job
        grows up to so many and shrinks as the policy says, and its script uses ``gpuslice.elastic``. A script
        or module is started by torchrun as so many ranks. A torchrun command of its own is told how many to
        start, and started anew for another number. 0: no more than ``devices``.
    device_memory_bytes, most_device_memory_bytes
        What it may allocate on each of its devices: a limit (0: not stated, and none). Over that limit it is
        started again with twice as much, up to ``most_device_memory_bytes`` (0: it has failed).
    tenant, app
        Whose it is. Jobs of one app search for one model together, under the policy ``themis``.
    weight
        Its share under policies that know weights.
    steps, max_steps
        How many optimizer steps it has, if known: for its progress. With ``max_steps`` it is ended, well, at
        the first boundary after so many. 0: not stated.
    expected_s
        How long it trains on its devices, if known, for policies that must know; 0: not stated.
    deadline_s, guaranteed
        By when it is to be through, in seconds from now (0: whenever), and whether it is refused if the
        policy cannot guarantee that. ``submit`` then waits for that decision (docs/submit.md, Deadlines).
    trial, trial_batches
        Whether so many mini-batches are tried ahead of every queue, so that it fails early if it is broken.
    max_restarts
        How often it is started again after a failure that was not its user's (docs/recovery.md).
    boundary_timeout_s, on_boundary_timeout
        If it reaches no boundary for so long when told to stop, that is reported (0: never), and it is left
        running or killed.
    grace_s
        How long its processes may take to end when they are asked to, before they are killed (0: they are not
        asked). None: as long as ``gpuslice up --grace`` says.
    checkpoint_every
        Save its attached state at every so many boundaries, while the training goes on.
    route
        How its devices are emptied (docs/gpus.md).
    env
        Variables for it, besides ``environ``.
    environ, directory
        Its environment and its working directory, if not those of the process that submits it.
    """

    name: Annotated[
        JobName | None, Option(_COMMAND, "ID", "The job's id; else the script's name and a number.")
    ] = None
    devices: Annotated[
        RankCount,
        Option(
            _DEVICES,
            "K[:M]",
            "Devices, one for each of its ranks; up to M if it can grow.",
            most="most_devices",
        ),
    ] = 1
    most_devices: OptionalRankCount = 0
    device_memory_bytes: Annotated[
        ByteCount,
        Option(
            _DEVICES,
            "3G[:6G]",
            "Limit on each device; over it, again with twice as much, up to 6G.",
            name="memory",
            most="most_device_memory_bytes",
        ),
    ] = 0
    most_device_memory_bytes: ByteCount = 0
    tenant: Annotated[Label, Option(_SHARES, "T", "Whose it is.")] = ""
    app: Annotated[Label, Option(_SHARES, "A", "Jobs of one app search for one model together (themis).")] = (
        ""
    )
    weight: Annotated[Weight, Option(_SHARES, "W", "Its share, where the policy knows weights.")] = 1.0
    steps: Annotated[Count, Option(_TIMES, "N", "Optimizer steps it has, if known: for its progress.")] = 0
    max_steps: Annotated[Count, Option(_TIMES, "N", "End it, well, after N optimizer steps.")] = 0
    expected_s: Annotated[
        Seconds,
        Option(_TIMES, "40m", "How long it trains on its devices, as far as you know.", name="duration"),
    ] = 0.0
    deadline_s: Annotated[Seconds, Option(_TIMES, "2h", "By when it is to be through, from now.")] = 0.0
    guaranteed: Annotated[
        bool, Option(_TIMES, "", "Refuse it if chronus cannot guarantee that (--steps or --duration).")
    ] = False
    trial: Annotated[
        bool,
        Option(_SHARES, "", "Try it first, ahead of all others, so that it fails early if at all."),
    ] = False
    trial_batches: Annotated[Count, Option(_SHARES, "N", "Mini-batches of a trial.")] = 5
    max_restarts: Annotated[Count, Option(_ENDS, "R", "Attempts after failures that are not the user's.")] = 0
    boundary_timeout_s: Annotated[
        Seconds,
        Option(
            _ENDS,
            "60s",
            "Report it if it reaches no boundary for so long (or: never).",
            words={"never": 0.0},
        ),
    ] = 60.0
    on_boundary_timeout: Annotated[
        Literal["leave", "kill"], Option(_ENDS, "leave|kill", "What else to do with it then.")
    ] = "leave"
    grace_s: Annotated[
        Seconds | None,
        Option(_ENDS, "30s", "Time to end when told to, before it is killed; else up's."),
    ] = None
    checkpoint_every: Annotated[
        Count | None,
        Option(_ENDS, "N", "Save attached state at every Nth boundary while training goes on."),
    ] = None
    route: Annotated[
        Literal["auto", "tensor", "vmm", "driver"] | None,
        Option(_DEVICES, "ROUTE", "How the device is emptied: auto, tensor, vmm or driver."),
    ] = None
    env: Annotated[Mapping[VariableName, Word], Option(_COMMAND, "K=V", "A variable for the job.")] = {}
    environ: Mapping[VariableName, Word] | None = None
    directory: PathText = ""

    def check(self) -> None:
        """Refuse values that contradict each other; each is within its range already.

        Raises
        ------
        UsageError
            Naming the values.
        """
        if self.guaranteed and not self.deadline_s:
            raise UsageError("there is no deadline to be guaranteed", "state it: --deadline 2h")
        if self.guaranteed and not (self.steps or self.max_steps or self.expected_s):
            raise UsageError(
                "without the number of its steps nobody can tell how long it takes, nor guarantee a deadline",
                "state it: --steps N; or how long it takes: --duration 40m",
            )
        least_bytes, most_bytes = self.device_memory_bytes, self.most_device_memory_bytes
        if most_bytes and not 0 < least_bytes <= most_bytes:
            raise UsageError(
                f"a memory limit of {least_bytes} bytes cannot grow to {most_bytes}",
                "write the smaller one first: --memory 3G:6G",
            )
        if self.most_devices and self.most_devices < self.devices:
            raise UsageError(
                f"{self.devices} to {self.most_devices} devices are not possible",
                "write the smaller number first: --devices 1:4",
            )
