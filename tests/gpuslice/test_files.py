"""One check for every directory that only its user may enter, and one way to replace a file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.files import private_directory, replace_file


def test_it_is_made_private_whatever_the_umask(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        private_directory(tmp_path / "a" / "b", option="--there", parents=True)
        private_directory(tmp_path / "a" / "b", option="--there")
    finally:
        os.umask(former)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["link", "file", "open", "foreign", "orphan"])
def test_anything_else_is_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "d"
    if kind == "link":
        (tmp_path / "target").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "target")
    elif kind == "file":
        path.touch(mode=0o700)
    elif kind == "orphan":
        path = tmp_path / "missing" / "d"
    else:
        path.mkdir(mode=0o750 if kind == "open" else 0o700)
    if kind == "foreign":
        if os.geteuid() != 0:
            pytest.skip("only root can give directories away")
        os.chown(path, 4711, 4711)
    words = {
        "link": "is a symbolic link",
        "file": "is not a directory",
        "open": "has mode 0750 instead of 0700",
        "foreign": "belongs to user 4711",
        "orphan": "No such file or directory",
    }
    with pytest.raises(EnvironmentUnusableError, match=words[kind]) as caught:
        private_directory(path, option="--there")
    assert "--there" in caught.value.remedy
    if kind == "open":
        assert path.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("kind", ["plain", "relative", "chain", "above"])
def test_a_link_to_a_private_directory_of_ones_own_is_accepted_if_that_is_allowed(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "disk").mkdir()
    target, path = tmp_path / "disk" / "target", tmp_path / "link"
    target.mkdir(mode=0o700)
    if kind == "above":  # as a home directory on another disk
        path.symlink_to(tmp_path / "disk")
        path /= "target"
    elif kind == "chain":
        (tmp_path / "disk" / "second").symlink_to("../disk/target")
        path.symlink_to(tmp_path / "disk" / "second")
    else:
        path.symlink_to("disk/target" if kind == "relative" else target)
    private_directory(path, option="--there", by_link=True)


@pytest.mark.parametrize("kind", ["open", "file", "nowhere", "loop", "writable", "foreign", "sticky"])
def test_a_link_that_others_could_turn_elsewhere_is_refused(tmp_path: Path, kind: str) -> None:
    between, path = tmp_path / "between", tmp_path / "link"
    between.mkdir()
    target = between / "target"
    target.mkdir(mode=0o755 if kind == "open" else 0o700)
    second = between / "second"
    second.symlink_to(target)
    words = {
        "open": f"is a symbolic link to {target}, which has mode 0755",
        "file": f"is a symbolic link to {target}, which is not a directory",
        "nowhere": "is a symbolic link that leads nowhere",
        "loop": "is a symbolic link that leads nowhere",
        "writable": f"whoever may write there could replace {second} on the way",
        "foreign": f"user 4711 could replace {second} on the way",
        "sticky": f"user 4711 could replace {second} on the way",
    }
    if kind in ("foreign", "sticky") and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    if kind in ("file", "nowhere", "loop"):
        target.rmdir()
    if kind == "file":
        target.touch()
    elif kind == "loop":
        target.symlink_to(path)
    elif kind == "writable":
        between.chmod(0o770)
    elif kind == "foreign":
        os.chown(between, 4711, 4711)
    elif kind == "sticky":
        between.chmod(0o1777)
        os.lchown(second, 4711, 4711)
    path.symlink_to(second)
    with pytest.raises(EnvironmentUnusableError, match=words[kind]):
        private_directory(path, option="--there", by_link=True)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept.json"
    status = replace_file(path, b"old")
    assert (path.read_bytes(), status.st_ino) == (b"old", path.stat().st_ino)

    def full(draft: Path, target: Path) -> None:
        assert draft.read_bytes() == b"new"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
