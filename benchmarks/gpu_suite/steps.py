"""Steps of the suite: commands with deadlines, of which nothing is left when they are over.

Standard library only, so that it works before anything is installed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: pytest found no test to run.
NOTHING_COLLECTED = 5
_PR_SET_CHILD_SUBREAPER = 36
#: How long a step may take to clear up after SIGTERM.
GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Step:
    """One finished step; ``exit_code`` is ``None`` if its time was over, or if none was left for it."""

    name: str
    command: list[str]
    exit_code: int | None
    seconds: float

    @property
    def failed(self) -> bool:
        return self.exit_code not in (0, NOTHING_COLLECTED)


def link_tree(directory: Path) -> Path:
    """A directory that shows the checkout as the installed package, beside its tests and benchmarks.

    Steps run in it, so that Python does not find the checkout's own ``gpuslice`` folder, which lacks parts.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    parts: dict[str, str] = project["tool"]["setuptools"]["package-dir"]
    package = directory / "gpuslice"
    package.mkdir(parents=True)
    for path in (ROOT / "gpuslice").iterdir():
        (package / path.name).symlink_to(path)
    for name, folder in parts.items():
        if name != "gpuslice":
            (directory / name.replace(".", "/")).symlink_to(ROOT / folder)
    for name in ("benchmarks", "tests", "pyproject.toml"):
        (directory / name).symlink_to(ROOT / name)
    return directory


class Runner:
    """Runs one Python command after the other and keeps what they print.

    Parameters
    ----------
    tree
        Working directory and first place for imports, from `link_tree`.
    out
        Directory for the output.
    limit_s
        For all steps together.
    patience
        Of single steps' limits, which are those of a real GPU: they take longer over a simulated one.
    """

    def __init__(self, tree: Path, out: Path, limit_s: float, patience: float = 1.0) -> None:
        self._tree, self._out = tree, out
        self._patience = patience
        self._ends_s = time.monotonic() + limit_s
        path = filter(None, [str(tree), os.environ.get("PYTHONPATH")])
        self._environ = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path)}
        self.steps: list[Step] = []
        adopt_orphans()

    def run(
        self,
        name: str,
        words: Sequence[str],
        *,
        output: str,
        limit_s: float,
        environ: Mapping[str, str] | None = None,
    ) -> Step:
        """Run a Python command; its standard output goes to the file ``output``."""
        limit_s = min(limit_s * self._patience, self._ends_s - time.monotonic())
        print(f"{name}: {' '.join(words)}", flush=True)
        began_s = time.monotonic()
        code = None
        if limit_s > 0:
            with (self._out / output).open("wb") as log:
                code = run_alone(
                    [sys.executable, *words],
                    stdout=log,
                    cwd=self._tree,
                    env=self._environ | (environ or {}),
                    limit_s=limit_s,
                )
        step = Step(name, list(words), code, round(time.monotonic() - began_s, 1))
        outcome = {None: "ran out of time", NOTHING_COLLECTED: "nothing to run"}.get(
            code, f"exit code {code}"
        )
        print(f"{name}: {outcome} after {step.seconds} s, see {self._out / output}", flush=True)
        self.steps.append(step)
        return step


def run_alone(
    command: Sequence[str], *, stdout: object, cwd: Path, env: Mapping[str, str], limit_s: float
) -> int | None:
    """Run a command; when it is over, or its time is, nothing that it started is left.

    Returns its exit code, or ``None`` if it ran out of time.
    """
    child = subprocess.Popen(command, stdout=stdout, cwd=cwd, env=dict(env), start_new_session=True)  # type: ignore[call-overload]
    code = None
    try:
        code = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        child.terminate()
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
    finally:
        end_descendants()
    return code


def adopt_orphans() -> None:
    """Have this process be the parent of whatever its children leave behind (prctl(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_descendants() -> None:
    """Kill the children of this process, whose own children become ours then, until there are none."""
    while children := list(_children()):
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def _children() -> Iterator[int]:
    """By the fourth field of proc_pid_stat(5), since not every kernel lists a process's children."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                continue
            if int(stat.rpartition(")")[2].split()[1]) == os.getpid():
                yield int(entry.name)
