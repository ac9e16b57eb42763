"""One scheduler per device of the host, whoever starts them and wherever."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuslice.daemon import device_locks
from gpuslice.daemon.device_locks import held
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.kernels.nvml import Driver, Gpu
from gpuslice.types import DeviceName

CPUS = tuple(DeviceName("cpu", index) for index in range(3))
#: Holds the locks of the devices in its arguments until its input ends; says so, or why it cannot.
HOLDER = """
import os, sys
from pathlib import Path
from gpuslice.daemon.device_locks import held
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.types import DeviceName
if user := int(sys.argv[1]):
    os.setgid(user)
    os.setuid(user)
try:
    with held(Path(sys.argv[2]), [DeviceName.parse(word) for word in sys.argv[3:]]):
        print("held", flush=True)
        sys.stdin.read()
except EnvironmentUnusableError as error:
    print(error, flush=True)
"""


@contextmanager
def another(
    directory: str, *devices: str, user: int = 0, says: str = "held"
) -> Iterator[subprocess.Popen[str]]:
    """A scheduler's process that has tried to get the locks of ``devices``."""
    command = [sys.executable, "-c", HOLDER, str(user), directory, *devices]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert says in process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_a_device_that_another_scheduler_has_is_refused_and_said_whose_it_is(tmp_path: Path) -> None:
    with another("/state/a", "cpu:0", "cpu:1") as process:
        with pytest.raises(EnvironmentUnusableError) as caught, held(tmp_path, CPUS):
            pass
        assert "cpu:0, cpu:1 have a scheduler already" in caught.value.message
        me = pwd.getpwuid(os.geteuid()).pw_name
        assert f"process {process.pid} of user {me} in /state/a" in caught.value.message
        assert "--state-dir /state/a" in caught.value.remedy
        with held(tmp_path, CPUS[2:]), another("/state/c", "cpu:2", says=f"process {os.getpid()} of user"):
            pass
        with another("/state/b", "cpu:2"):
            pass  # what was refused, and what has ended, has left nothing locked


def test_the_locks_of_a_killed_scheduler_are_free_and_its_children_have_none(tmp_path: Path) -> None:
    with another(str(tmp_path), "cpu:0") as process:
        process.send_signal(signal.SIGKILL)
        with held(tmp_path, CPUS[:1]):
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            forked = os.fork()
            if not forked:
                signal.pause()
                os._exit(0)
        try:
            with another("/state/b", "cpu:0"):
                pass
        finally:
            os.kill(forked, signal.SIGKILL)
            os.waitpid(forked, 0)
            child.kill()
            child.communicate()


def test_devices_of_other_nodes_and_imagined_ones_are_not_locked(tmp_path: Path) -> None:
    devices = [CPUS[0], CPUS[0].on("b"), DeviceName("null", 0)]
    with held(tmp_path, devices):
        assert os.listdir(os.environ["GPUSLICE_LOCK_DIR"]) == [f"gpuslice-device.cpu-0.{os.geteuid()}"]
    assert not os.listdir(os.environ["GPUSLICE_LOCK_DIR"])


def test_a_gpu_is_known_by_its_uuid_however_it_is_numbered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = tuple(Gpu(index, "GPU", f"GPU-{index}a", "9.0", 1, 0) for index in range(2))
    monkeypatch.setattr("gpuslice.kernels.nvml.read_driver", lambda: Driver("580.1", "13.0", gpus))
    for shown, key in ((None, "GPU-0a"), ("1,0", "GPU-1a"), ("GPU-1a", "GPU-1a")):
        if shown is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        with held(tmp_path, [DeviceName("cuda", 0)]):
            assert os.listdir(os.environ["GPUSLICE_LOCK_DIR"]) == [f"gpuslice-device.{key}.{os.geteuid()}"]


def test_a_predecessor_that_is_being_ended_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with another(str(tmp_path), "cpu:0") as process:

        class Wait:
            def wait(self, _: float) -> None:
                process.kill()

        monkeypatch.setattr(device_locks, "Event", Wait)
        with held(tmp_path, CPUS[:1]):
            pass


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@as_root
def test_users_see_each_others_locks_and_cannot_take_them_away(tmp_path: Path) -> None:
    locks = Path(os.environ["GPUSLICE_LOCK_DIR"])
    locks.chmod(0o1777)
    with another("/state/ann", "cpu:0", user=4711) as ann:
        whose = f"cpu:0 has a scheduler already: process {ann.pid} of user 4711 in /state/ann"
        with another("/state/bob", "cpu:0", "cpu:1", user=4712, says=whose):
            pass
        with pytest.raises(EnvironmentUnusableError, match=whose), held(tmp_path, CPUS):
            pass
        remove = f"import os; os.setuid(4712); os.unlink({str(locks / 'gpuslice-device.cpu-0.4711')!r})"
        assert (
            b"PermissionError"
            in subprocess.run([sys.executable, "-c", remove], capture_output=True, check=False).stderr
        )
    with another("/state/bob", "cpu:0", user=4712):
        pass


@as_root
@pytest.mark.parametrize(
    ("mode", "owner", "why"),
    [
        (0o777, 0, "has mode 0777: others could remove locks"),
        (0o1777, 4712, "belongs to user 4712, who could remove locks"),
        (0o755, 0, "Permission denied"),
    ],
)
def test_a_directory_where_locks_could_be_removed_is_refused(mode: int, owner: int, why: str) -> None:
    locks = Path(os.environ["GPUSLICE_LOCK_DIR"])
    locks.chmod(mode)
    os.chown(locks, owner, owner)
    with another("/state/ann", "cpu:0", user=4711, says=why):
        pass


@as_root
@pytest.mark.parametrize("squatter", ["link", "file", "fifo"])
def test_a_squatted_name_is_an_error_or_nobodys_lock_never_no_lock(squatter: str) -> None:
    locks = Path(os.environ["GPUSLICE_LOCK_DIR"])
    locks.chmod(0o1777)
    for name, outcome in (("4711", "lock file"), ("1", "held")):
        path = locks / f"gpuslice-device.cpu-0.{name}"
        if squatter == "link":
            path.symlink_to("/etc/passwd")
        elif squatter == "file":
            path.touch(mode=0o666)
        else:
            os.mkfifo(path, 0o666)
        with another("/state/ann", "cpu:0", user=4711, says=outcome):
            pass
        path.unlink()
    hidden = locks / "gpuslice-device.cpu-0.4712"
    hidden.touch(mode=0o600)
    with another("/state/ann", "cpu:0", user=4711, says="cannot see whether another user has cpu:0"):
        pass


@pytest.mark.parametrize("kind", ["missing parent", "file"])
def test_a_place_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    locks = tmp_path / "missing" / "locks"
    if kind == "file":
        locks = tmp_path / "locks"
        locks.touch()
    monkeypatch.setenv("GPUSLICE_LOCK_DIR", str(locks))
    with pytest.raises(EnvironmentUnusableError, match=str(locks)) as caught, held(tmp_path, CPUS):
        pass
    assert "GPUSLICE_LOCK_DIR" in caught.value.remedy


def test_what_a_lock_file_says_is_not_believed(tmp_path: Path) -> None:
    """A file that says nothing of use, or too much, of a lock that is held."""
    path = Path(os.environ["GPUSLICE_LOCK_DIR"]) / f"gpuslice-device.cpu-0.{os.geteuid()}"
    with another("/state/a", "cpu:0") as process:
        for content in (b"", b"\xff", b'{"pid": "x"}', b'{"directory": "\\u001b[31m"}', b"[" * 9000):
            path.write_bytes(content)
            with pytest.raises(EnvironmentUnusableError) as caught, held(tmp_path, CPUS[:1]):
                pass
            assert f"process {process.pid} of user" in caught.value.message
            assert caught.value.message.isprintable()
