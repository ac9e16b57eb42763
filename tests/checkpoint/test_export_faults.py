"""Every single call at which an export can find that its target cannot be written."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuslice.checkpoint.format.export_safetensors import export_safetensors
from gpuslice.checkpoint.format.layout import TensorSpec
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.named.export_dcp import export_dcp
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.errors import EnvironmentUnusableError

from .conftest import MIB, Save

Export = Callable[[SnapshotFile, Path], int]
#: What makes, names and flushes files; and their writes, which are counted as they reach the system.
NAMED = ("mkdir", "fsync", "rename", "replace")


class Fault:
    """Makes the call of a number fail; a write gets half of its bytes out first."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int, code: int) -> None:
        self.left = number
        self.code = code
        self.hit: str | None = None
        for name in NAMED:
            patch.setattr(os, name, self.wrap(name, getattr(os, name)))
        plain_open = Path.open
        fault = self

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                if fault.strikes("write"):
                    super().write(bytes(data)[: len(data) // 2])
                    raise fault.error()
                return super().write(data)

        def open_file(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if not {"w", "x"} & set(mode):
                return plain_open(path, mode, *arguments, **options)
            if fault.strikes("open"):
                raise fault.error()
            return io.BufferedWriter(File(path, mode.replace("b", "")))

        patch.setattr(Path, "open", open_file)

    def strikes(self, name: str) -> bool:
        self.left -= 1
        if self.left == 0:
            self.hit = name
        return self.left == 0

    def error(self) -> OSError:
        return OSError(self.code, os.strerror(self.code))

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*arguments: Any, **options: Any) -> Any:
            needless = name == "mkdir" and os.path.isdir(arguments[0])  # as torch makes sure of it
            if not needless and self.strikes(name):
                raise self.error()
            return function(*arguments, **options)

        return faulty


@pytest.fixture
def snapshot(store: JobStore, save: Save) -> SnapshotFile:
    sizes = (2 * MIB, 100)
    specs = tuple(TensorSpec(f"w{sid}", sid, "uint8", (size,), (1,)) for sid, size in enumerate(sizes))
    return save(store, sizes=sizes, tensors=specs)


def failure(act: Callable[[], object]) -> EnvironmentUnusableError | None:
    try:
        act()
    except EnvironmentUnusableError as error:
        return error
    return None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize(
    ("export", "calls"),
    [
        (export_safetensors, {"open", "write", "fsync", "replace"}),
        (export_dcp, {"mkdir", "open", "write", "fsync", "rename"}),
    ],
    ids=["safetensors", "dcp"],
)
def test_an_export_fails_at_any_call(
    export: Export,
    calls: set[str],
    code: int,
    snapshot: SnapshotFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hits = set()
    for number in range(1, 60):
        with monkeypatch.context() as patch:
            fault = Fault(patch, number, code)
            error = failure(lambda: export(snapshot, tmp_path / "out"))
        assert (error is None) == (fault.hit is None)
        if error is None:
            break
        assert error.message == f"cannot write {tmp_path / 'out'}: {os.strerror(code)}"
        assert error.remedy == "choose another place with enough room"
        hits.add(fault.hit)
        assert os.listdir(tmp_path) == []
    else:
        pytest.fail("it never came to its end")
    assert calls <= hits
    assert os.listdir(tmp_path) == ["out"]


def test_what_an_export_would_have_replaced_stays(
    snapshot: SnapshotFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").write_text("older")
    for number in range(1, 6):
        with monkeypatch.context() as patch:
            Fault(patch, number, errno.ENOSPC)
            with pytest.raises(EnvironmentUnusableError):
                export_safetensors(snapshot, tmp_path / "out")
        assert (tmp_path / "out").read_text() == "older"
        assert os.listdir(tmp_path) == ["out"]
