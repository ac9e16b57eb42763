"""The measured rates of the GPUs' links, and the file in the user's cache that keeps them.

Imports no torch: a child process measures.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.files import replace_file
from gpuslice.kernels.compiler import cache_directory

_DEADLINE_S = 300
_FILE = "link_rates.json"


class Rates(msgspec.Struct, frozen=True):
    """The measured rates of one GPU: page-locked copies in 1e9 bytes per second, and the cost of locking.

    Attributes
    ----------
    page_lock_s_per_gb
        Seconds per 1e9 bytes; ``None`` if the host's memory cannot be locked.
    """

    out_gb_per_s: float
    in_gb_per_s: float
    page_lock_s_per_gb: float | None


class Peer(msgspec.Struct, frozen=True):
    """The copy rate from one GPU to another. ``direct`` is True if copies do not go through the host."""

    source: str
    target: str
    direct: bool
    gb_per_s: float


class Outcome(msgspec.Struct, frozen=True):
    """What the measuring child process prints."""

    rates: dict[str, Rates]
    peers: list[Peer]
    problems: list[str]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement, with the driver and GPUs that it applies to.

    Attributes
    ----------
    measured_at_s
        Unix time of the measurement.
    driver
        The driver's version at that time.
    uuids
        UUIDs of the GPUs by their names at that time. The rates do not apply to other GPUs or
        to another order.
    """

    measured_at_s: float
    driver: str
    uuids: dict[str, str]
    rates: dict[str, Rates]
    peers: list[Peer]
    problems: list[str]

    def is_of(self, driver: str, uuids: Mapping[str, str]) -> bool:
        """Return True if the measurement applies to this driver and these GPUs."""
        return self.driver == driver and self.uuids == dict(uuids)


def measure(driver: str, uuids: Mapping[str, str], now_s: float) -> Measured:
    """Measure these GPUs in a child process, and return the measurement.

    Raises
    ------
    EnvironmentUnusableError
        If the child process fails.
    """
    outcome = _in_child(list(uuids))
    return Measured(
        measured_at_s=now_s,
        driver=driver,
        uuids=dict(uuids),
        rates=outcome.rates,
        peers=outcome.peers,
        problems=outcome.problems,
    )


def _in_child(names: Sequence[str]) -> Outcome:
    command = [sys.executable, "-m", "gpuslice.profiler.link_rates", *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        problem = f"measuring did not end within {_DEADLINE_S} s"
    else:
        if done.returncode == 0:
            return msgspec.json.decode(done.stdout, type=Outcome)
        last = "".join(done.stderr.strip().splitlines()[-1:])
        problem = f"measuring ended with {done.returncode}: {last}"
    raise EnvironmentUnusableError(problem, "try `gpuslice doctor --check`, which names what does not work")


def load(environ: Mapping[str, str]) -> Measured | None:
    """Return the last measurement of this user; None if there is none.

    Raises
    ------
    EnvironmentUnusableError
        If the file exists and cannot be read.
    """
    path = cache_directory(environ) / _FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Measured)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise EnvironmentUnusableError(
            f"{path} cannot be read: {error}", "measure again: --measure"
        ) from error


def save(measured: Measured, environ: Mapping[str, str]) -> None:
    """Save the measurement for the next ``gpuslice doctor``. A reader sees the old file or the new one.

    Raises
    ------
    EnvironmentUnusableError
        If it cannot be written.
    """
    directory = cache_directory(environ)
    try:
        replace_file(directory / _FILE, msgspec.json.encode(measured))
    except OSError as error:
        raise EnvironmentUnusableError(
            f"{directory / _FILE} cannot be written: {error.strerror}",
            "set XDG_CACHE_HOME to another directory",
        ) from error
