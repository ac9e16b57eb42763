"""Run what takes long by nature: ``./x soak [NAME ...]``.

    python -m tests.soak [NAME ...] [--minutes M]

Each soak is a command that can fail. It is run again and again, with another seed each time, until its time
is over or it has failed. The last result of each is kept in ``tests/soak.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests" / "soak.json"
_ENDS = ("everybody_ends", "honest_ranks", "accounts", "packing_fairness")
#: Markers of tests that `./x test` does not run.
_ELSEWHERE = "gangs or nodes or ray or trainings"
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")


class Run(NamedTuple):
    """One run of a soak: what Python is to run, and with which variables."""

    words: tuple[str, ...]
    environ: Mapping[str, str] = MappingProxyType({})


def _worlds(seed: int, left_s: float) -> Run:
    """The scheduler core in a thousand worlds in virtual time, with faults of every kind."""
    windows = ("--windows",) if seed // 1000 % 2 else ()  # pauses, drains and reservations in every other run
    own = ("--own-times",) if seed // 2000 % 2 else ()  # and what jobs wait for themselves in every other two
    rooms = ("--rooms",) if seed // 4000 % 2 else ()  # and nodes with little room in every other four
    kinds = (*windows, *own, *rooms)
    return Run(("-m", "tests.sched_core.world", "--runs", "1000", "--seed", str(seed), *kinds))


def _week(seed: int, left_s: float) -> Run:
    """Weeks of a box in virtual time: thirty people's arrays, reservations, pauses, a drain, a reboot."""
    return Run(("-m", "tests.sched_core.world", "--weeks", "--runs", "20", "--seed", str(seed)))


def _chaos(seed: int, left_s: float) -> Run:
    """Jobs, agents and schedulers that are killed at random."""
    environ = {"GPUSLICE_CHAOS_S": f"{min(left_s, 600.0):.0f}", "GPUSLICE_CHAOS_SEED": str(seed)}
    return Run((*_PYTEST, "tests/cli/test_chaos.py"), environ)


def _borders(seed: int, left_s: float) -> Run:
    """A hundred thousand messages that nobody should send, on both sockets of a scheduler."""
    return Run((*_PYTEST, "tests/cli/test_borders.py"), {"GPUSLICE_BORDERS": "100000"})


def _ends(seed: int, left_s: float) -> Run:
    """Worlds in which anything happens before all jobs are to end, or all time is to be accounted for."""
    files = (f"tests/sched_core/test_{name}.py" for name in _ENDS)
    return Run((*_PYTEST, *files), {"GPUSLICE_ENDS": str(seed)})


def _oracles(seed: int, left_s: float) -> Run:
    """All that a published simulator was recorded with, and the compiled engine under all orders."""
    words = (*_PYTEST, "tests/sched_core/sim/test_peer.py", "tests/sched_core/sim/test_compiled.py")
    return Run(words, {"GPUSLICE_ORACLES": "all"})


def _away(seed: int, left_s: float) -> Run:
    """Every call of a device fails, with every kind of error, while a state is away."""
    return Run((*_PYTEST, "tests/gpuslice/test_away.py"), {"GPUSLICE_AWAY": "each"})


def _flips(seed: int, left_s: float) -> Run:
    """Journals with 1,500 flipped bits, one at a time."""
    return Run((*_PYTEST, "tests/sched_core/journal/test_journal.py"), {"GPUSLICE_FLIPS": "1500"})


def _kills(seed: int, left_s: float) -> Run:
    """Ranks of a gang killed at every moment, and trainings killed at random boundaries."""
    words = (*_PYTEST, "tests/sched_core/test_killed_gangs.py", "tests/gpuslice/test_restart.py")
    return Run(words, {"GPUSLICE_KILLS": "all"})


def _cycles(seed: int, left_s: float) -> Run:
    """Ten thousand suspends and resumes, after which memory, files and descriptors are level."""
    return Run((*_PYTEST, "tests/checkpoint/test_endurance.py"), {"GPUSLICE_CYCLES": "10000"})


def _nodes(seed: int, left_s: float) -> Run:
    """Fifty random moments at which agents are stopped or killed and networks cut, over ssh nodes."""
    return Run(("-m", "tests.gpuslice.nodes.moments", "--moments", "50", "--seed", str(seed)))


def _ray_nodes(seed: int, left_s: float) -> Run:
    """The same over nodes of Ray, which are killed and started again, too."""
    words = ("--engine", "ray", "--moments", "50", "--seed", str(seed))
    return Run(("-m", "tests.gpuslice.nodes.moments", *words))


def _repeats(seed: int, left_s: float) -> Run:
    """Tests that check with other draws what those of ``./x test`` check."""
    return Run((*_PYTEST, "-n", "2", "-m", f"repeats and not ({_ELSEWHERE})", "tests"))


def _gangs(seed: int, left_s: float) -> Run:
    """The same of ``./x test-gangs``."""
    return Run((*_PYTEST, "-m", f"repeats and ({_ELSEWHERE})", "tests"))


SOAKS: dict[str, Callable[[int, float], Run]] = {
    "worlds": _worlds,
    "week": _week,
    "chaos": _chaos,
    "borders": _borders,
    "kills": _kills,
    "ends": _ends,
    "oracles": _oracles,
    "away": _away,
    "flips": _flips,
    "cycles": _cycles,
    "nodes": _nodes,
    "ray-nodes": _ray_nodes,
    "repeats": _repeats,
    "gangs": _gangs,
}


def soak(name: str, minutes: float) -> dict[str, object]:
    """Run one soak until its time is over or it has failed; return what is kept of it.

    Parameters
    ----------
    name
        A key of `SOAKS`.
    minutes
        When no other run begins any more.
    """
    began_s, runs, code = time.monotonic(), 0, 0
    seed = random.SystemRandom().randrange(10**6)
    first = seed
    while code == 0 and (runs == 0 or time.monotonic() - began_s < 60.0 * minutes):
        run = SOAKS[name](seed, 60.0 * minutes - (time.monotonic() - began_s))
        code = subprocess.run(
            [sys.executable, *run.words], cwd=ROOT, env={**os.environ, **run.environ}, check=False
        ).returncode
        runs, seed = runs + 1, seed + 1000
    cores = len(os.sched_getaffinity(0))
    return {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {cores} cores, Python {platform.python_version()}",
        "minutes": round((time.monotonic() - began_s) / 60.0, 1),
        "runs": runs,
        "first_seed": first,
        "failed": code != 0,
    }


def main() -> int:
    """Run the soaks that are named, or all; return 1 if one has failed."""
    parser = argparse.ArgumentParser(prog="./x soak", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SOAKS)}; all without one")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="of each")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in SOAKS]:
        parser.error(f"there is no soak {unknown[0]!r}; choose of {', '.join(SOAKS)}")
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in options.names or SOAKS:
        results[name] = soak(name, options.minutes)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"soak {name}: {results[name]}", flush=True)
    return int(any(results[name]["failed"] for name in options.names or SOAKS))


if __name__ == "__main__":
    sys.exit(main())
