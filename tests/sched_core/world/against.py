"""Today's core and the core of another commit in the same worlds, each in a process of its own.

The other process has the product's code of that commit and that commit's worlds, which know how to drive its
core. Today's scenarios are put into them. So both cores meet the same jobs, owners and faults, as long as the
worlds' own rules are the same. Each world is lived through twice: with its faults, and without them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from .compare import Account, account, differences
from .record import Violation
from .scenario import Scenario, draw_scenario
from .schedulers import todays_core

ROOT = Path(__file__).parents[3]
#: The folders that are installed as one package.
PARTS = ("gpuslice", "checkpoint", "kernels", "profiler", "sched_core")
WORLDS = Path("tests", "sched_core", "world")
#: The files of the worlds that another commit's are replaced by: what is drawn, and what is compared.
_OF_TODAY = ("against.py", "compare.py", "draws.py", "profiles.py", "scenario.py")
#: So many differences of each kind are printed in full.
_SHOWN = 3
#: Makes the parts in the first folder the package ``gpuslice``, and takes the worlds from the second one.
_BEGIN = """
import sys
product, worlds, first, runs = sys.argv[1:]
sys.path[:0] = [product, worlds]
import gpuslice
gpuslice.__path__ = [product + "/gpuslice", product]
from tests.sched_core.world.against import live
live(int(first), int(runs))
"""


class Lived(NamedTuple):
    """What a core has made of one world: its account, or the violation that ended the world."""

    account: Account | None
    violation: str


def scenarios(first: int, runs: int) -> Iterator[Scenario]:
    """Yield the worlds of ``runs`` seeds, each with its faults and without them."""
    for seed in range(first, first + runs):
        yield draw_scenario(seed)
        yield draw_scenario(seed).without_faults()


def live(first: int, runs: int) -> None:
    """Print what the core that can be imported here makes of each world, one line a world."""
    for scenario in scenarios(first, runs):
        try:
            lived = Lived(account(scenario, todays_core), "")
        except Violation as violation:
            lived = Lived(None, str(violation).partition(", after")[0])
        sys.stdout.buffer.write(msgspec.json.encode(lived) + b"\n")
        sys.stdout.flush()


@contextmanager
def core_at(product: Path, first: int, runs: int, worlds: Path = ROOT) -> Iterator[Iterator[Lived]]:
    """Yield what the core in the folder ``product`` makes of each world, of the tree ``worlds``."""
    words = [sys.executable, "-c", _BEGIN, str(product), str(worlds), str(first), str(runs)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=product) as process:
        assert process.stdout is not None
        yield (msgspec.json.decode(line, type=Lived) for line in process.stdout)
    if process.returncode:
        raise SystemExit(f"the core in {product} ended with exit code {process.returncode}")


def against(commit: str, first: int, runs: int) -> int:
    """Compare today's core with that of ``commit`` in worlds. Return the violations of today's core.

    A count per kind of difference is printed, and the first ones of each kind in full.
    """
    archive = subprocess.run(
        ["git", "archive", commit, *PARTS, "tests"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    ).stdout
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(archive)) as packed:
            packed.extractall(folder, filter="data")
        tree = Path(folder)
        for name in _OF_TODAY:
            shutil.copy(ROOT / WORLDS / name, tree / WORLDS / name)
        with core_at(tree, first, runs, tree) as then, core_at(ROOT, first, runs) as now:
            return report(scenarios(first, runs), then, now)


def report(worlds: Iterator[Scenario], then: Iterator[Lived], now: Iterator[Lived]) -> int:
    """Print what the core of today did otherwise than the one of ``then``. Return its violations."""
    kinds, lived, violations = Counter[str](), 0, 0
    for scenario, one, other in zip(worlds, then, now, strict=True):
        lived += 1
        violations += bool(other.violation)
        for kind, said in _apart(scenario, one, other):
            kinds[kind] += 1
            if kinds[kind] <= _SHOWN:
                print(f"seed {scenario.seed}, {kind}: {said}", flush=True)
    print(f"{lived} worlds, {kinds.total()} differences, {violations} violations of today's core")
    for kind, times in kinds.most_common():
        print(f"{times:6} {kind}")
    return violations


def _apart(scenario: Scenario, one: Lived, other: Lived) -> Iterator[tuple[str, str]]:
    """Yield the kind of each difference between what two cores made of a world, and what it is."""
    if one.account is None or other.account is None:
        if one.violation and other.violation:
            yield "violated by both", other.violation
        elif other.violation:
            yield "violated today only", other.violation
        else:
            yield "violated then only", one.violation
        return
    faults = "with faults" if scenario.faults else "without faults"
    for difference in differences(scenario, one.account, other.account):
        said = f"{difference.job or 'all'}: then {difference.first}, today {difference.second}"
        yield f"{difference.what} {faults}", said
