"""A Ray cluster of the command line, to be killed with all that Ray has, and started again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil

from gpuslice.nodes.plan import Answer, Wanted

from ...patience import PATIENCE_S
from ...ports import unused_port

_OBJECTS_BYTES = 100 << 20


class StartedRay:
    """Nodes of one machine, the first of which is the head; to this process they are nobody's.

    Parameters
    ----------
    root
        A directory for their RAM disks and logs.
    names
        Of the nodes.
    environs
        Variables that some of them have besides.
    """

    def __init__(
        self, root: Path, names: tuple[str, ...], environs: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        self.root, self._names, self._environs = root, names, environs or {}
        self.address = f"127.0.0.1:{unused_port()}"
        self._commands: dict[str, subprocess.Popen[bytes]] = {}

    def ramdisk(self, name: str) -> Path:
        return self.root / name

    def start(self, *, wait: bool = True) -> None:
        """Start all nodes that do not run. Wait until they are there, unless told not to."""
        for name in self._names:
            if name not in self._commands:
                self._commands[name] = self._start(name)
                if wait:
                    self._until(len(self._commands))
        self._start_again()

    def _start_again(self) -> None:
        """Start the nodes again whose command gave up: it waits for 30 s, whatever the machine does."""
        for name, command in self._commands.items():
            if command.poll() is not None:
                self._commands[name] = self._start(name)

    def kill(self, *names: str) -> None:
        """SIGKILL for everything of Ray on these nodes; without names on all, the head included."""
        for name in names or list(self._commands):
            command = self._commands.pop(name)
            if command.poll() is not None:
                continue
            family = psutil.Process(command.pid).children(recursive=True)
            for process in [psutil.Process(command.pid), *family]:
                process.kill()
            psutil.wait_procs(family, PATIENCE_S)
            command.wait()

    def kill_gcs(self) -> None:
        """SIGKILL for the head's control store (GCS) alone; what belongs to the head ends by itself then."""
        head = self._commands.pop(self._names[0])
        family = psutil.Process(head.pid).children(recursive=True)
        (store,) = (one for one in family if one.name() == "gcs_server")
        store.kill()
        head.wait(PATIENCE_S)
        psutil.wait_procs(family, PATIENCE_S)

    def actors(self) -> str:
        """All named ones, as another process sees them."""
        code = (
            "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level='ERROR')\n"
            "print(ray.util.list_named_actors(all_namespaces=True))"
        )
        words = [sys.executable, "-c", code, self.address]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        head = ("--head", "--port", self.address.rpartition(":")[2], "--include-dashboard=false")
        head += ("--temp-dir", str(self.root / "ray"))
        words = ("--node-name", name, "--num-cpus", "2", "--object-store-memory", str(_OBJECTS_BYTES))
        words += ("--min-worker-port", "0", "--max-worker-port", "0", "--disable-usage-stats", "--block")
        own = head if name == self._names[0] else ("--address", self.address)
        with (self.root / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *own, *words],
                env={
                    **os.environ,
                    "GPUSLICE_RAMDISK_DIR": str(self.ramdisk(name)),
                    **self._environs.get(name, {}),
                },
                stdout=log,
                stderr=log,
            )

    def _until(self, count: int) -> None:
        ends_s = time.monotonic() + PATIENCE_S
        asked = msgspec.json.encode(Wanted(address=self.address, devices=("cpu:0",)))
        while True:
            words = [sys.executable, "-m", "gpuslice.node_agents.agents", "find"]
            done = subprocess.run(words, input=asked, capture_output=True, check=False)
            if done.returncode == 0 and len(msgspec.json.decode(done.stdout, type=Answer).nodes) >= count:
                return
            assert time.monotonic() < ends_s, done.stderr
            self._start_again()
            time.sleep(0.2)
