"""Settings in one typed table: defaults < TOML file < environment < flags. Unknown keys are errors.

Every setting is one field of ``Settings``; its environment variable is ``GPUSLICE_`` + the field's
name in capitals. The TOML file is ``$GPUSLICE_CONFIG``, else ``gpuslice/config.toml`` in the XDG
configuration directory, if it exists.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from gpuslice.errors import ConfigError
from gpuslice.files import working_directory
from gpuslice.types import MAX_BYTES, MAX_COUNT, MAX_SECONDS, Count, PathText, Word, explain, is_word

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("kmgt", start=1)}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)?")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TIME_OF_DAY = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)
#: A boundary in a list of them; longer numbers are out of range anyway.
_BOUNDARY = re.compile(r"\s*-?[0-9]{1,20}\s*")

#: Characters of a wrong value that an error shows.
_SHOWN = 60
#: Names the directory in which schedulers lock their devices.
LOCK_DIR = "GPUSLICE_LOCK_DIR"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of a job. The launcher hands them down as ``GPUSLICE_*`` variables.

    Attributes
    ----------
    device
        The device the job runs on: ``cpu``, ``cpu:1``, ``cuda:0``; empty: where its state is found.
    cpu_slots
        Number of slots ``cpu:N`` into which the host's cores are divided; 0 means one per core.
    route
        The route by which the device is emptied.
    ramdisk_dir
        Directory of the RAM disk, empty for ``/dev/shm/gpuslice-<uid>``.
    ramdisk_limit
        Bytes the RAM disk may hold, ``4G`` style, or empty for half of the file system.
    tenant
        The tenant that the job belongs to: ``gpuslice submit --tenant``.
    tenant_ramdisk
        Bytes that the snapshots of all jobs of the tenant may take together, or empty for no such limit.
    spill_dir
        Directory on a disk to which snapshots of dead jobs move when the RAM disk is full, or empty.
    spill_limit
        Bytes that all snapshots may take in ``spill_dir``, ``50G`` style, or empty for its whole file system.
    suspend_every, suspend_at
        The drill: suspend and resume at every Nth boundary, or at the boundaries listed.
    checkpoint_every
        Save an attached, named job's state at every Nth boundary, for a restart; 0 for never.
    verify
        Compare a snapshot's bytes with their checksums when a resume or a restart takes them back.
    report
        File for the JSON report, or empty.
    profile, profile_steps
        File to record steps into, and number of steps after which the script ends; empty and 0 for none.
    job
        The job's name. A named job's snapshots outlive it, and a restarted process continues from them.
    fresh
        True to remove the snapshots of earlier runs of the named job before it begins.
    continue_anyway
        True to go on from the named job's snapshot even if other arguments, another text of the script or
        another torch made it.
    command
        A fingerprint of the launched command, set by the launcher.
    keep_children
        True to leave alone the processes that a submitted job has started and that outlive it.
    socket
        ZeroMQ endpoint of the scheduler, or empty.
    attempt
        Which attempt of a scheduled job this is, from 0; none without a scheduler.
    ranks
        Number of ranks for which the scheduler has devices; 0 without a scheduler.
    elastic
        True if the number of ranks may change, up to ``ranks``.
    memory
        Most bytes that each rank may allocate on its device, ``3G`` style, or empty for no limit.
    visible_gpus
        The scheduler's GPUs in the order of its numbers, as ``CUDA_VISIBLE_DEVICES`` would name them.
    """

    device: Word = ""
    cpu_slots: Count = 0
    route: Literal["auto", "tensor", "vmm", "driver"] = "auto"
    ramdisk_dir: PathText = ""
    ramdisk_limit: Word = ""
    tenant: Word = ""
    tenant_ramdisk: Word = ""
    spill_dir: PathText = ""
    spill_limit: Word = ""
    suspend_every: Count = 0
    suspend_at: Word = ""
    checkpoint_every: Count = 0
    verify: bool = True
    report: PathText = ""
    profile: PathText = ""
    profile_steps: Count = 0
    job: Word = ""
    fresh: bool = False
    continue_anyway: bool = False
    command: Word = ""
    keep_children: bool = False
    socket: Word = ""
    attempt: Count | None = None
    ranks: Count = 0
    elastic: bool = False
    memory: Word = ""
    visible_gpus: Word = ""

    def __post_init__(self) -> None:
        for size in filter(None, (self.ramdisk_limit, self.tenant_ramdisk, self.spill_limit, self.memory)):
            parse_size(size)
        parse_boundaries(self.suspend_at)

    def environ(self) -> dict[str, str]:
        """Return the ``GPUSLICE_*`` variables that give these settings to another process."""
        values = msgspec.structs.asdict(self)
        return {variable(name): str(value) for name, value in values.items() if value is not None}

    @property
    def ramdisk_directory(self) -> Path:
        """The directory of the RAM disk: the setting, else the user's own on tmpfs."""
        return Path(self.ramdisk_dir or f"/dev/shm/gpuslice-{os.geteuid()}")


def variable(field: str) -> str:
    """Return the environment variable of a setting: ``ramdisk_dir`` -> ``GPUSLICE_RAMDISK_DIR``."""
    return f"GPUSLICE_{field.upper()}"


#: The variable of a job whose snapshots are to be removed before its command is started.
BEGIN_ANEW = variable("begin_anew")
#: The variable of a process that is started before its turn: the file at which it waits.
GATE = variable("gate")
#: What that file says: the process may go on, and it waits.
GO, WAITS = b"g", b"w"


def load(environ: Mapping[str, str] | None = None, **flags: Any) -> Settings:
    """Return the settings from file, environment and flags. A flag that is None counts as not given.

    Raises
    ------
    ConfigError
        For an unknown key or an impossible value. The error names its source.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    values |= _from_file(environ)
    values |= {
        name: environ[variable(name)] for name in Settings.__struct_fields__ if variable(name) in environ
    }
    values |= {name: value for name, value in flags.items() if value is not None}
    try:
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        _, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`")
        kind = get_type_hints(Settings).get(name)
        choices = ", ".join(get_args(kind)) if get_origin(kind) is Literal else ""
        raise ConfigError(
            f"the setting {explain(error).replace(', not text', f', not {_short(str(values.get(name)))}')}",
            (f"choose among {choices}; " if choices else "")
            + f"it is set by an option, by {variable(name)} or in the configuration file",
        ) from error


def _from_file(environ: Mapping[str, str]) -> dict[str, Any]:
    named = environ.get("GPUSLICE_CONFIG")
    home = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/")) / ".config")
    path = Path(named) if named else home / "gpuslice" / "config.toml"
    if not named and not path.is_file():
        return {}
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "fix or remove the file") from error
    unknown = sorted(set(values) - set(Settings.__struct_fields__))
    if unknown:
        known = ", ".join(Settings.__struct_fields__)
        raise ConfigError(f"{path} has the unknown setting {unknown[0]!r}", f"known are: {known}")
    return values


def state_directory(given: str | Path | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """Return the directory in which a scheduler keeps its socket, jobs and logs.

    It is ``given``, else ``$GPUSLICE_STATE_DIR``, else ``gpuslice`` in the XDG state directory.

    Raises
    ------
    ConfigError
        If the path is not UTF-8 text, so that no socket can be there.
    UsageError
        If it is relative, and the working directory is gone.
    """
    environ = os.environ if environ is None else environ
    if given or environ.get("GPUSLICE_STATE_DIR"):
        directory = Path(given or environ["GPUSLICE_STATE_DIR"])
    else:
        home = Path(environ.get("XDG_STATE_HOME") or Path(environ.get("HOME", "/")) / ".local" / "state")
        directory = home / "gpuslice"
    if not is_word(str(directory)):
        raise ConfigError(
            f"the scheduler's directory {str(directory)!r} is not UTF-8 text", "choose another: --state-dir"
        )
    return directory if directory.is_absolute() else Path(working_directory()) / directory


def lock_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Return the directory in which all schedulers of this host lock their devices.

    It is ``$GPUSLICE_LOCK_DIR``, else ``/dev/shm``: every user can write there, and nothing clears it.
    """
    environ = os.environ if environ is None else environ
    return Path(environ.get(LOCK_DIR) or "/dev/shm")


def parse_duration(text: str, *, may_be_zero: bool = False) -> float:
    """Return the seconds in ``2s``, ``500ms``, ``1.5m``, ``2h`` or a plain number, above 0 as a rule."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2] or "s"] if match else -1.0
    if seconds < 0 or (seconds == 0 and not may_be_zero):
        raise ConfigError(f"{_short(text)} is not a time", "write for instance 2s or 500ms")
    if seconds > MAX_SECONDS:
        raise ConfigError(f"{_short(text)} is too long a time", f"at most {MAX_SECONDS:.0f}s are possible")
    return seconds


def parse_moment(text: str, now_unix_s: float) -> float:
    """Return the Unix time of ``20:00``, the next such local time, or of ``2h``, so long from now."""
    if (match := _TIME_OF_DAY.fullmatch(text.strip())) is None:
        try:
            return now_unix_s + parse_duration(text)
        except ConfigError as error:
            raise ConfigError(f"{_short(text)} is no moment", "write a local time as 20:00, or 2h") from error
    now = datetime.fromtimestamp(now_unix_s)
    then = now.replace(hour=int(match[1]), minute=int(match[2]), second=0, microsecond=0)
    return (then if then > now else then + timedelta(days=1)).timestamp()


def parse_size(text: str) -> int:
    """Return the bytes in ``4G``, ``512MiB`` or ``1000``. K, M, G, T are powers of 1000, Ki … Ti of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{_short(text)} is not a size", "write for instance 4G or 512MiB")
    nbytes = float(match[1]) * _UNITS[match[2].lower()]
    if nbytes > MAX_BYTES:
        raise ConfigError(f"{_short(text)} is too large a size", f"at most {MAX_BYTES} bytes are possible")
    return int(nbytes)


def format_size(nbytes: int) -> str:
    """Return a number of bytes as text in powers of 1024, such as ``512.00 MiB``."""
    unit = max(0, min(4, (nbytes.bit_length() - 1) // 10))
    return f"{nbytes / 2 ** (10 * unit):.2f} {'KMGT'[unit - 1]}iB" if unit else f"{nbytes} B"


def parse_boundaries(text: str) -> frozenset[int]:
    """Return the boundary numbers in ``3,17,40``. An empty text gives the empty set."""
    parts = text.split(",") if text.strip() else []
    if not all(map(_BOUNDARY.fullmatch, parts)):
        raise ConfigError(f"{_short(text)} is not a list of boundaries", "write for instance 3,17,40")
    numbers = frozenset(map(int, parts))
    if any(number < 1 for number in numbers):
        raise ConfigError(f"boundary {min(numbers)} does not exist", "the first boundary is 1")
    if any(number > MAX_COUNT for number in numbers):
        raise ConfigError(f"boundary {max(numbers)} is never reached", f"the last one is {MAX_COUNT}")
    return numbers


def _short(text: str) -> str:
    """Return ``text`` in quotes for a message, cut after 60 characters."""
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
