"""Machines of a test that are reached by a command in the place of ssh, each with a home of its own."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuslice.node_agents.ssh import COMMAND

from ...cli.conftest import Shell, shell_in

#: As ssh it gets options, a host and a command last. It runs that as on another machine of another user.
_COMMAND = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
echo "$1" >> {root}/logins
if [ -e {root}/"$1".broken ]; then cat {root}/"$1".broken >&2; exit 255; fi
echo "Welcome to $1"
export HOME={root}/"$1" USER=other GPUSLICE_RAMDISK_DIR={ramdisks}/"$1"
export SSH_CONNECTION="127.0.0.1 4000 127.0.0.1 22"
unset GPUSLICE_STATE_DIR GPUSLICE_SSH XDG_STATE_HOME XDG_CONFIG_HOME GPUSLICE_CONFIG
mkdir -p "$HOME" && cd "$HOME" && exec sh -c "$2"
"""


class Machines:
    """The command, and what it leaves in the homes of the machines.

    Parameters
    ----------
    root
        A directory for it and for the homes.
    ramdisks
        A directory for the RAM disks of the machines.
    """

    def __init__(self, root: Path, ramdisks: Path) -> None:
        self.root = root
        self.ramdisks = ramdisks
        self.command = root / "ssh"
        self.command.write_text(_COMMAND.format(root=root, ramdisks=ramdisks))
        self.command.chmod(0o700)
        self.python = root / "python"
        self.python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')

    def break_down(self, host: str, said: str) -> None:
        """Let ssh fail for a host from now on, with these words."""
        (self.root / f"{host}.broken").write_text(said + "\n")

    def mend(self, host: str) -> None:
        """Let ssh reach a host again."""
        (self.root / f"{host}.broken").unlink()

    def agent_directory(self, host: str, node: str) -> Path:
        """Return where the agent of a node keeps its things on that host."""
        (found,) = (self.root / host / ".local/state/gpuslice/agents").glob(f"{node}-*")
        return found

    def agent(self, host: str, node: str) -> int:
        """Return the process id of the agent of a node on that host."""
        return int((self.agent_directory(host, node) / "scheduler.pid").read_text())

    def keeper(self, host: str, node: str) -> int:
        """Return the process id of what restarts that agent."""
        return int((self.agent_directory(host, node) / "keeper.pid").read_text())

    def files_with(self, secret: bytes) -> list[str]:
        """Return the files of all machines in which a secret is."""
        paths = (path for path in self.root.rglob("*") if path.is_file())
        return [os.fspath(path) for path in paths if secret in path.read_bytes()]


@contextmanager
def machines_in(ramdisks: Path) -> Iterator[Machines]:
    """Machines in a directory of their own, with a short path: an agent's is that of a socket."""
    with tempfile.TemporaryDirectory(prefix="g-") as root:
        yield Machines(Path(root), ramdisks)


@contextmanager
def shell_of(machines: Machines) -> Iterator[Shell]:
    """A scheduler's commands that use these machines; nothing is left of what they started."""
    with shell_in(machines.root / "s") as found:
        found.variables[COMMAND] = str(machines.command)
        yield found
