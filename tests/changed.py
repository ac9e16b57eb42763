"""Check and test what has changed since ``main``: ``./x quick``.

    python tests/changed.py [BASE]

checks the changed files with ruff and mypy, and runs the tests that import a changed module, those of the
same name first. No test of another name begins after `TESTS_S`; those left out are counted, and ``./x test``
runs all.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("gpuslice", "kernels", "checkpoint", "profiler", "sched_core")
#: How long tests may go on to begin, in seconds.
TESTS_S = 15.0
#: Tests that need more than this machine's everyday environment, or long.
LEFT_OUT = "not (slow or gpu or gangs or trainings or nodes or ray or frameworks or repeats)"

_begun_s = time.monotonic()


def changed_files(base: str) -> list[Path]:
    """Return the files that differ from ``base`` or that git does not know yet."""
    lines = _git("diff", "--name-only", base) + _git("ls-files", "--others", "--exclude-standard")
    return sorted({Path(line) for line in lines if (ROOT / line).is_file()})


def module_of(file: Path) -> str:
    """Return the name by which tests import ``file``, or an empty text if it is no module of the product."""
    if file.suffix != ".py" or file.parts[0] not in PARTS:
        return ""
    parts = [*file.parts[:-1], *([] if file.stem == "__init__" else [file.stem])]
    return ".".join(parts if parts[0] == "gpuslice" else ["gpuslice", *parts])


def imports(source: str, module: str) -> bool:
    """Return True if ``source`` imports ``module`` or something out of it."""
    package, _, name = module.rpartition(".")
    pattern = rf"^\s*(?:from {re.escape(module)} import|import {re.escape(module)}\b)"
    if package:
        pattern += rf"|^\s*from {re.escape(package)} import (?:\(?[\w\s,]*\b)?{name}\b"
    return re.search(pattern, source, re.MULTILINE) is not None


class Chosen(NamedTuple):
    """A file of tests to run."""

    test: Path
    #: True if it is run however late it is.
    always: bool


def chosen_tests(files: Iterable[Path], tests: dict[Path, str]) -> list[Chosen]:
    """Return the tests of changed ``files``: themselves, those of the same name, then other importers.

    Parameters
    ----------
    files
        What has changed.
    tests
        Every file of tests, with its text.
    """
    files = list(files)
    modules = {name: file for file in files if (name := module_of(file))}
    ranked: list[tuple[bool, bool, Path]] = []
    for test, source in tests.items():
        imported = [file for name, file in modules.items() if imports(source, name)]
        same = any(test.stem == f"test_{file.stem}" for file in imported)
        if test in files or imported:
            ranked.append((test not in files, not same, test))
    return [Chosen(test, always=not (other and another)) for other, another, test in sorted(ranked)]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the files that are never left out; pytest calls it, as this file is a plugin of that run."""
    parser.addoption("--always", action="append", default=[])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what would begin too late."""
    late = time.monotonic() - _begun_s > TESTS_S
    if late and str(item.path.relative_to(ROOT)) not in item.config.getoption("--always"):
        pytest.skip("left out by ./x quick: no time")


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def _run(*words: str) -> int:
    return subprocess.run([sys.executable, "-m", *words], cwd=ROOT, check=False).returncode


def main(base: str) -> int:
    """Check and test what differs from ``base``; return 0 if all of it is well."""
    files = changed_files(base)
    python = [str(file) for file in files if file.suffix == ".py"]
    if not python:
        print(f"quick: no Python file differs from {base[:12]}")
        return 0
    types = subprocess.Popen([sys.executable, "-m", "mypy", "-p", "gpuslice"], cwd=ROOT)
    failed = _run("ruff", "check", *python) | _run("ruff", "format", "--check", *python)
    sources = {
        path.relative_to(ROOT): path.read_text(encoding="utf-8")
        for path in (ROOT / "tests").rglob("test_*.py")
    }
    chosen = chosen_tests(files, sources)
    if chosen:
        words = ("-q", "-n", "3", "--dist", "worksteal", "-p", "tests.changed", "-m", LEFT_OUT, "-rs")
        always = [f"--always={test}" for test, always in chosen if always]
        failed |= _run("pytest", *words, *always, *(str(test) for test, _ in chosen)) not in (0, 5)
    else:
        print("quick: no test imports what has changed; ./x test runs all")
    return int(bool(failed | types.wait()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "HEAD"))
