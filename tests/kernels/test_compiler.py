from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.kernels.compiler import cache_directory, find_compiler, shared_library

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler here")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n", encoding="utf-8")
    return path


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path / "cache")}


@needs_compiler
def test_compiled_once_per_source(source: Path, environ: dict[str, str]) -> None:
    library = shared_library(source, environ)
    assert ctypes.CDLL(str(library)).answer() == 42
    stamp = library.stat().st_mtime_ns
    assert shared_library(source, environ) == library
    assert library.stat().st_mtime_ns == stamp
    source.write_text("int answer(void) { return 43; }\n", encoding="utf-8")
    other = shared_library(source, environ)
    assert other != library
    assert ctypes.CDLL(str(other)).answer() == 43
    assert sorted(other.parent.iterdir()) == sorted([library, other]), "no drafts stay"


@needs_compiler
def test_a_source_that_does_not_compile_is_told(source: Path, environ: dict[str, str]) -> None:
    source.write_text("int answer(void) { return }\n", encoding="utf-8")
    with pytest.raises(EnvironmentUnusableError, match=r"failed: .*error"):
        shared_library(source, environ)


@pytest.mark.parametrize("named", [{}, {"CC": "no-such-compiler"}])
def test_without_a_compiler(source: Path, tmp_path: Path, named: dict[str, str]) -> None:
    nowhere = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), **named}
    assert find_compiler(nowhere) is None
    with pytest.raises(EnvironmentUnusableError, match="no C compiler"):
        shared_library(source, nowhere)


def test_the_cache_is_private(environ: dict[str, str]) -> None:
    directory = cache_directory(environ)
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o770)
    with pytest.raises(EnvironmentUnusableError, match="has mode 0770"):
        cache_directory(environ)


def test_a_link_is_no_cache(environ: dict[str, str], tmp_path: Path) -> None:
    base = Path(environ["XDG_CACHE_HOME"])
    base.mkdir()
    (base / "gpuslice").symlink_to(tmp_path)
    with pytest.raises(EnvironmentUnusableError, match="is a symbolic link"):
        cache_directory(environ)
