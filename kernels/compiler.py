"""Compile the package's own C files with the system's compiler, once per user, into a private cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.files import private_directory

_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread")
_TIMEOUT_S = 60


def find_compiler(environ: Mapping[str, str] | None = None) -> list[str] | None:
    """Return the words of the C compiler's command: ``$CC``, else the first of cc, gcc and clang; or None."""
    environ = os.environ if environ is None else environ
    named = shlex.split(environ.get("CC", ""))
    for words in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        path = shutil.which(words[0], path=environ.get("PATH"))
        if path is not None:
            return [path, *words[1:]]
    return None


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Return the user's private directory for compiled files. Create it if it is missing.

    Raises
    ------
    EnvironmentUnusableError
        If it cannot be made, or another user could put a library there.
    """
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "/"), ".cache")
    directory = Path(base) / "gpuslice"
    private_directory(directory, option="XDG_CACHE_HOME", parents=True)
    return directory


def shared_library(source: Path, environ: Mapping[str, str] | None = None) -> Path:
    """Return the path of a C file's shared library. Compile it if the cache has none.

    Raises
    ------
    EnvironmentUnusableError
        Without a compiler, with the compiler's first words if it fails, or without a private cache.
    """
    compiler = find_compiler(environ)
    if compiler is None:
        raise EnvironmentUnusableError("there is no C compiler here", "install gcc, or set CC")
    target = cache_directory(environ) / f"{source.stem}-{_fingerprint(source, compiler)}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
        draft = Path(scratch) / target.name
        _run([*compiler, *_FLAGS, "-o", str(draft), str(source), "-ldl"])
        # Another process may compile the same file; both rename the same bytes to this path.
        draft.replace(target)
    return target


def _fingerprint(source: Path, compiler: list[str]) -> str:
    status = os.stat(compiler[0])
    identity = (
        *compiler,
        os.path.realpath(compiler[0]),
        status.st_size,
        status.st_mtime_ns,
        platform.machine(),
    )
    return hashlib.sha256(source.read_bytes() + repr((identity, _FLAGS)).encode()).hexdigest()[:24]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentUnusableError(
            f"{command[0]} does not work: {error}", "set CC to another compiler"
        ) from error
    if done.returncode != 0:
        first = next(
            (line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200]
        )
        raise EnvironmentUnusableError(f"{command[0]} failed: {first}", "set CC to another compiler")
