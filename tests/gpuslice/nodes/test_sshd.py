"""The same over OpenSSH: a server of this test on this machine, with keys and a configuration of its own."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuslice.node_agents.ssh import COMMAND

from ...cli.conftest import Shell, shell_in
from ...cli.waiting import until
from ...patience import PATIENCE_S
from .machines import Machines, machines_in
from .test_ssh_nodes import devices, secret, up

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
pytestmark = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None, reason="no sshd here: apt-get install openssh-server"
)
_SERVER = """
Port {port}
ListenAddress 127.0.0.1
HostKey {root}/host_key
AuthorizedKeysFile {root}/user_key.pub
PidFile {root}/sshd.pid
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
PermitRootLogin yes
SetEnv XDG_STATE_HOME={root}/state GPUSLICE_RAMDISK_DIR={ramdisks}/there
"""
_CLIENT = """
Host one
  HostName 127.0.0.1
  Port {port}
  IdentityFile {root}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {root}/known_hosts
Host unknown
  HostName 127.0.0.1
  Port {port}
  IdentityFile {root}/user_key
  UserKnownHostsFile {root}/no_hosts
Host locked
  HostName 127.0.0.1
  Port {port}
  IdentityFile {root}/other_key
  IdentitiesOnly yes
  UserKnownHostsFile {root}/known_hosts
Host closed
  HostName 127.0.0.1
  Port 1
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served(root: Path, ramdisks: Path) -> Iterator[str]:
    """A server; the command that reaches it is yielded."""
    port = free_port()
    for name in ("host_key", "user_key", "other_key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(root / name)]
        subprocess.run(words, check=True)
    public = " ".join((root / "host_key.pub").read_text().split()[:2])
    (root / "known_hosts").write_text(f"[127.0.0.1]:{port} {public}\n")
    (root / "sshd_config").write_text(_SERVER.format(port=port, root=root, ramdisks=ramdisks))
    (root / "ssh_config").write_text(_CLIENT.format(port=port, root=root))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd of root insists on it
    assert SSHD is not None
    with (root / "sshd.log").open("wb") as log:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(root / "sshd_config")], stderr=log)
    try:
        ends_s = time.monotonic() + PATIENCE_S
        while not (root / "sshd.pid").exists():
            assert server.poll() is None, (root / "sshd.log").read_text()
            assert time.monotonic() < ends_s
            time.sleep(0.05)
        yield f"ssh -F {shlex.quote(str(root / 'ssh_config'))}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def machines(shm: Path) -> Iterator[Machines]:
    with machines_in(shm) as made:
        yield made


@pytest.fixture
def shell(machines: Machines) -> Iterator[Shell]:
    with (
        served(machines.root, machines.ramdisks) as command,
        shell_in(machines.root / "s") as made,
    ):
        made.variables[COMMAND] = command
        yield made


def test_a_job_runs_by_openssh(shell: Shell, machines: Machines) -> None:
    up(shell, "--node", "b=one", "--devices", "b/null:1")
    assert devices(shell) == ["b/null:0"]
    job = shell.submit(shell.directory / "enough")
    until(shell.client(), job, lambda one: one.steps > 0)
    (directory,) = (machines.root / "state/gpuslice/agents").iterdir()
    assert machines.files_with(secret(shell)) == [str(shell.directory / "node-keys" / "client.secret")]
    (shell.directory / "enough").touch()
    ended = shell.client().wait(job, PATIENCE_S)
    assert ended is not None
    assert ended.state == "succeeded"
    shell("down")
    assert not (directory / "keeper.pid").exists()


def test_why_ssh_cannot_log_in_is_said_in_its_words(shell: Shell) -> None:
    nodes = ("--node", "a=unknown", "--node", "b=locked", "--node", "c=closed")
    said = up(shell, *nodes, "--devices", "a/null:1", code=3)
    assert "a: ssh cannot log in to unknown: Host key verification failed" in said
    assert "b: ssh cannot log in to locked: " in said
    assert "Permission denied" in said
    assert "c: ssh cannot log in to closed: " in said
    assert "Connection refused" in said
