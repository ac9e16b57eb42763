"""The one definition of what a user can ask for with a job, ``JobRequest``, or with many, ``ArrayRequest``.

Each field is a keyword of ``Client.submit``, part of the message to the scheduler, and checked there. A field
with an ``Option`` is an option of ``gpuslice submit`` and a key of a ``job.toml``, too. Its type and the
unit in its name decide how its text is read (``gpuslice/client/job_options.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from gpuslice.errors import UsageError
from gpuslice.types import (
    ByteCount,
    Count,
    Dependency,
    JobName,
    Label,
    OptionalRankCount,
    PathText,
    Priority,
    RankCount,
    Seconds,
    UnixTime,
    VariableName,
    Weight,
    Word,
)


class Option(NamedTuple):
    """The notation of a field on a command line and in a ``job.toml``.

    Attributes
    ----------
    group
        The part of the help that has the option.
    metavar, help
        The placeholder for the value in the help, and the explanation.
    name
        ``"max_steps"`` gives ``--max-steps`` and the key ``max_steps``. Empty: the field's name, no unit.
    most
        The field that the second number of ``1:4`` sets.
    words
        Words that stand for a value, such as ``never``.
    """

    group: str
    metavar: str
    help: str
    name: str = ""
    most: str = ""
    words: Mapping[str, float] = {}


_DEVICES = "Devices and memory"
_TIMES = "Steps and times"
_BEGIN = "When it may start"
_SHARES = "Order and shares"
_ENDS = "Failures and the end"
_COMMAND = "The command"
_MANY = "Many jobs"


class JobRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The properties of a job that its user can ask for.

    Attributes
    ----------
    name
        The job's id. None: the script's name and a number.
    devices, most_devices
        Number of devices, all or none, and of ranks. A script that takes its rank from its launcher is
        started by torchrun (docs/submit.md, Ranks). With a larger ``most_devices`` the job grows up to that
        number and shrinks as the policy decides, and its script uses ``gpuslice.elastic``. A script or module
        is started by torchrun with that number of ranks. A torchrun command of the user's is told how many
        to start, and is started again when the number changes. 0: no more than ``devices``.
    device_memory_bytes, most_device_memory_bytes
        Limit of what the job may allocate on each of its devices (0: no limit). A job that exceeds it is
        started again with twice as much, up to ``most_device_memory_bytes`` (0: the job fails).
    tenant, app
        The job's owner and its app. Jobs of one app search for one model together, under the policy
        ``themis``.
    weight
        The job's share under policies that know weights.
    priority
        Jobs of higher priority get devices before others, under every policy. The policy ranks equal ones.
    steps, max_steps
        Number of optimizer steps, if known, to show progress. ``max_steps`` ends the job as a success at
        the first boundary after that number. 0: not stated.
    expected_s
        Time that the job trains on its devices, if known, for policies that need it; 0: not stated.
    deadline_s, guaranteed
        Deadline in seconds from now (0: none), and True to refuse the job if the policy cannot guarantee the
        deadline. ``submit`` then waits for that decision (docs/submit.md, Deadlines).
    time_limit_s
        Time on its devices after which the job is told to end and has failed (0: no limit). Waiting, parked
        and switching time does not count.
    trial, trial_batches
        True to try that number of mini-batches ahead of every queue, so that a broken job fails early.
    hold, begin_unix_s, after
        What the job waits for before it is started: its owner's ``resume``, a moment in seconds since 1970
        (0: none), and the ends of other jobs: ``a`` or ``a:ok`` (it succeeded), ``a:failed``, ``a:any``. If
        the other job ends otherwise, this one is cancelled. An array's id stands for all of its jobs.
    max_restarts
        Number of restarts after failures that are not the user's (docs/recovery.md).
    boundary_timeout_s, on_boundary_timeout
        Time after which a job that is told to stop and reaches no boundary is reported (0: never), and
        whether it is left running or killed then.
    grace_s
        Time that the job's processes have to end when they are asked to, before they are killed (0: they are
        not asked). None: the value of ``gpuslice up --grace``.
    wait_for_node_s
        Time that the job waits for a node that does not answer and has its processes or its state. Then it
        goes on without: from an older snapshot, or from the beginning. None: the value of ``gpuslice up
        --wait-for-node``.
    on_end, notify
        A shell command that is run, and a URL to which a message is sent, when the job has ended for good
        (docs/submit.md, When a job has ended). Empty: none.
    checkpoint_every
        Save the attached state at every Nth boundary, while the training goes on.
    route
        The route by which the job's devices are emptied (docs/gpus.md).
    env
        Environment variables for the job, besides ``environ``.
    environ, directory
        The job's environment and working directory, if not those of the process that submits it.
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
            "Memory limit on each device; with :6G, restart with twice as much, up to 6G.",
            name="memory",
            most="most_device_memory_bytes",
        ),
    ] = 0
    most_device_memory_bytes: ByteCount = 0
    tenant: Annotated[
        Label, Option(_SHARES, "T", "The tenant that the job belongs to: quotas, RAM disk limits.")
    ] = ""
    app: Annotated[Label, Option(_SHARES, "A", "Jobs of one app search for one model together (themis).")] = (
        ""
    )
    weight: Annotated[Weight, Option(_SHARES, "W", "The job's share under rr and gandiva.")] = 1.0
    priority: Annotated[
        Priority, Option(_SHARES, "N", "Jobs of higher priority get devices first, under every policy.")
    ] = 0
    steps: Annotated[Count, Option(_TIMES, "N", "Optimizer steps of the whole training, if known.")] = 0
    max_steps: Annotated[Count, Option(_TIMES, "N", "End the job as a success after N optimizer steps.")] = 0
    expected_s: Annotated[
        Seconds,
        Option(_TIMES, "40m", "How long the job trains on its devices, as far as you know.", name="duration"),
    ] = 0.0
    deadline_s: Annotated[
        Seconds, Option(_TIMES, "2h", "Time from now in which the job should be finished.")
    ] = 0.0
    time_limit_s: Annotated[
        Seconds,
        Option(_TIMES, "6h", "End the job as failed after so long on its devices. Waiting does not count."),
    ] = 0.0
    guaranteed: Annotated[
        bool, Option(_TIMES, "", "Refuse the job if chronus cannot guarantee its deadline.")
    ] = False
    trial: Annotated[
        bool,
        Option(
            _SHARES, "", "First run a few mini-batches, ahead of all others, so that mistakes show early."
        ),
    ] = False
    trial_batches: Annotated[Count, Option(_SHARES, "N", "Mini-batches of a trial.")] = 5
    hold: Annotated[bool, Option(_BEGIN, "", "Do not start the job before `gpuslice resume`.")] = False
    begin_unix_s: Annotated[
        UnixTime,
        Option(
            _BEGIN,
            "20:00",
            "Do not start the job before this local time, or for so long (2h).",
            name="begin",
        ),
    ] = 0.0
    after: Annotated[
        tuple[Dependency, ...],
        Option(
            _BEGIN,
            "JOB[:ok|any|failed]",
            "Start the job only when JOB or ARRAY has succeeded (ok), failed, or ended (any). Default: ok.",
        ),
    ] = ()
    max_restarts: Annotated[
        Count, Option(_ENDS, "R", "Restarts after failures that are not the script's fault.")
    ] = 0
    boundary_timeout_s: Annotated[
        Seconds,
        Option(
            _ENDS,
            "60s",
            "Report the job if it reaches no boundary for so long (or: never).",
            words={"never": 0.0},
        ),
    ] = 60.0
    on_boundary_timeout: Annotated[
        Literal["leave", "kill"], Option(_ENDS, "leave|kill", "What else to do with the job then.")
    ] = "leave"
    grace_s: Annotated[
        Seconds | None,
        Option(_ENDS, "30s", "Time to end when told to, before it is killed; else up's."),
    ] = None
    wait_for_node_s: Annotated[
        Seconds | None,
        Option(
            _ENDS,
            "10m",
            "Time to wait for a node that does not answer and has its state, 0s: none; else up's.",
            words={"0s": 0.0, "0": 0.0},
        ),
    ] = None
    on_end: Annotated[
        Word, Option(_ENDS, "CMD", "Run this shell command when the job has ended for good.")
    ] = ""
    notify: Annotated[
        Word, Option(_ENDS, "URL", "Send a small JSON by POST to this URL when the job has ended for good.")
    ] = ""
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
        """Raise if values contradict each other. Each is within its range already.

        Raises
        ------
        UsageError
            If they do. The error names the values.
        """
        if self.guaranteed and not self.deadline_s:
            raise UsageError("--guaranteed is given without a deadline", "add it: --deadline 2h")
        if self.guaranteed and not (self.steps or self.max_steps or self.expected_s):
            raise UsageError(
                "without the number of its steps nobody can tell how long it takes, nor guarantee a deadline",
                "state it: --steps N; or how long it takes: --duration 40m",
            )
        if self.guaranteed and (self.hold or self.begin_unix_s or self.after):
            raise UsageError(
                "--guaranteed cannot be decided for a job that is not to start yet",
                "leave out --hold, --begin and --after, or --guaranteed",
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
        if self.notify and (wrong := _wrong_url(self.notify)):
            # Without the URL, which may hold a secret.
            raise UsageError(f"--notify {wrong}", "write for instance --notify https://example.org/hook")


def _wrong_url(url: str) -> str:
    """Return what is wrong with a URL for messages, or an empty text."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "is no URL"
    if parts.scheme not in ("http", "https"):
        return "needs a URL that begins with http:// or https://"
    if not host or not url.isascii() or not url.isprintable() or " " in url:
        return "is no URL"
    if parts.username is not None:
        return "has a user before its host, which is not supported"
    return ""


class ArrayRequest(JobRequest, frozen=True, kw_only=True):
    """The properties of many jobs of one command, and which jobs they are.

    Either ``array`` or ``grid`` is stated. The other fields are those of each job. ``name`` is the array's
    id, and the jobs are ``NAME-0`` and so on. Each finds its number in ``GPUSLICE_ARRAY_INDEX``.

    Attributes
    ----------
    array
        The first and the last number, such as ``0-99``, and the most jobs at once behind ``%``. ``{}`` in
        the command becomes the number.
    grid
        Values by name, with commas: one job for each combination. ``{lr}`` in the command becomes the value
        of ``lr``, which is in ``GPUSLICE_GRID_LR``, too.
    at_once
        The most of these jobs that may have devices at a time. 0: any number.
    """

    array: Annotated[
        Word, Option(_MANY, "A-B[%N]", "One job for each number, in place of {}; N of them at once.")
    ] = ""
    grid: Annotated[
        Mapping[VariableName, Word],
        Option(_MANY, "K=V,V", "One job for each combination of values, in place of {K}."),
    ] = {}
    at_once: Annotated[Count, Option(_MANY, "N", "The most of these jobs that have devices at a time.")] = 0

    def check(self) -> None:
        """Raise ``UsageError`` if values contradict each other."""
        super().check()
        if self.array and self.grid:
            raise UsageError("--array and --grid are both given", "add a name: --grid seed=0,1,2")
        if not (self.array or self.grid):
            raise UsageError("neither --array nor --grid is given", "write for instance --array 0-99")
        if self.guaranteed:
            raise UsageError("--guaranteed is for one job, not for an array", "submit each job by itself")
