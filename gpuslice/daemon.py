"""The scheduler as a process of its own: what ``gpuslice up`` runs."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from gpuslice import eventlog, launch
from gpuslice.clock import ContinuedClock
from gpuslice.config import Settings, variable
from gpuslice.errors import ConfigError, UsageError
from gpuslice.private import private_directory
from gpuslice.sched_core.core import SWITCH_SHARE, Core
from gpuslice.sched_core.curve import scheduler_keys
from gpuslice.sched_core.desk import Desk
from gpuslice.sched_core.endpoint import host_and_port
from gpuslice.sched_core.events import Command, Event
from gpuslice.sched_core.journal import FILE, Journal
from gpuslice.sched_core.live import Scheduler
from gpuslice.sched_core.policies.registry import POLICIES, make_policy, policy_options
from gpuslice.sched_core.standing import Overview
from gpuslice.types import DeviceName
from gpuslice.witness import Witness

LOG = "scheduler.log"
_READY = b"r"
#: What ``--quantum`` is called in policies.
_QUANTA = ("quantum_s", "first_slice_s")
#: Policies that must know how long jobs run, for which what ``submit --steps`` tells is enough.
_ESTIMATES_DO = ("srtf", "srsf", "sjf", "chronus")


@dataclass(frozen=True)
class Setup:
    """What a scheduler is started with.

    Attributes
    ----------
    devices
        What it gives away.
    policy, options
        Who decides, and the policy's own settings as text.
    ramdisk_limit
        Most bytes that the jobs' snapshots may take together, ``8G`` style; empty for the usual.
    switch_share
        Part of the time that switching may take.
    quotas
        How many devices the jobs of a tenant may ask for together.
    memory_bytes
        Of each device, of the smallest if they differ; 0: not known.
    """

    devices: tuple[DeviceName, ...]
    policy: str = "rr"
    options: Mapping[str, str] = field(default_factory=dict)
    ramdisk_limit: str = ""
    switch_share: float = SWITCH_SHARE
    quotas: Mapping[str, int] = field(default_factory=dict)
    memory_bytes: int = 0

    def make_core(self) -> Core:
        """A core that knows no job yet.

        Raises
        ------
        ConfigError
            If the policy or an option does not exist, or it needs to know how long jobs run.
        """
        policy = make_policy(self.policy, self.options)
        if policy.needs_durations and self.policy in POLICIES and self.policy not in _ESTIMATES_DO:
            raise ConfigError(
                f"policy {self.policy} needs to know how long jobs run, which nobody does here",
                f"choose one that does not, such as rr, 2das or las, or of {', '.join(_ESTIMATES_DO)}",
            )
        return Core(
            self.devices,
            policy,
            switch_share=self.switch_share,
            quotas=self.quotas,
            memory_bytes=self.memory_bytes,
        )

    def environ(self) -> dict[str, str]:
        """The settings that every job gets."""
        slots = max(((device.index or 0) + 1 for device in self.devices if device.kind == "cpu"), default=0)
        values = {"cpu_slots": str(slots), "ramdisk_limit": self.ramdisk_limit}
        return {variable(name): value for name, value in values.items() if value not in ("", "0")}


def parse_devices(text: str) -> tuple[DeviceName, ...]:
    """The devices of ``cuda:0,cuda:1`` by name, or of ``cpu:2`` (alone) so many slots of the host.

    Raises
    ------
    UsageError
        If one is no device or is named twice.
    EnvironmentUnusableError
        If one is not here.
    """
    names = [DeviceName.parse(part.strip()) for part in text.split(",")]
    if len(names) == 1 and names[0].kind != "cuda":
        names = [DeviceName(names[0].kind, index) for index in range(names[0].index or 1)]
    if len(set(names)) != len(names):
        raise UsageError(f"--devices {text} names a device twice", "name each once")
    for name in names:
        launch.check(Settings(device=str(name), cpu_slots=(name.index or 0) + 1))
    return tuple(names)


def device_memory(devices: Sequence[DeviceName]) -> int:
    """Bytes of memory of the smallest of ``devices``; slots of the host share its memory. 0: not known."""
    sizes: list[int] = []
    slots = sum(device.kind == "cpu" for device in devices)
    if slots:
        sizes.append(psutil.virtual_memory().total // slots)
    if any(device.kind == "cuda" for device in devices):
        from gpuslice.kernels.nvml import read_driver, visible

        gpus = visible(read_driver().gpus, os.environ)
        numbers = [device.index or 0 for device in devices if device.kind == "cuda"]
        totals = [gpus[number].total_bytes for number in numbers if number < len(gpus)]
        sizes += [total for total in totals if total]
    return min(sizes, default=0)


def quotas(settings: Sequence[str]) -> dict[str, int]:
    """Devices by tenant from ``tenant=devices``.

    Raises
    ------
    UsageError
        If one is not that.
    """
    found: dict[str, int] = {}
    for setting in settings:
        tenant, equals, devices = setting.partition("=")
        if not equals or not devices.isdigit():
            raise UsageError(f"--quota {setting} is not TENANT=DEVICES", "write for instance vision=2")
        found[tenant] = int(devices)
    return found


def options(policy: str, settings: Sequence[str], quantum_s: float | None) -> dict[str, str]:
    """The policy's own settings from ``--set key=value`` and ``--quantum``.

    Raises
    ------
    UsageError
        If one is not ``key=value``, or the policy has no quantum.
    """
    found: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {setting} is not KEY=VALUE", "write for instance --set quantum_s=2")
        found[key] = value
    if policy == "chronus":
        return _leases(found, 60.0 if quantum_s is None else quantum_s)
    takes = [key for key in _QUANTA if key in policy_options(policy)]
    for key in takes:
        found.setdefault(key, str(2.0 if quantum_s is None else quantum_s))
    if quantum_s is not None and not takes:
        raise UsageError(f"policy {policy} has no quantum", "leave out --quantum; see --set")
    return found


def _leases(given: dict[str, str], quantum_s: float) -> dict[str, str]:
    """Chronus' settings: leases of whole quanta, and everything said that may differ between two starts.

    A journal is replayed through the same policy, so it matters which solver made the plans, too.
    """
    solver = "highs" if importlib.util.find_spec("highspy") else "greedy"
    usual = {
        "best_effort_lease_s": str(quantum_s),
        "lease_s": str(2 * quantum_s),
        "margin": "1.1",  # as the published artifact has it
        "solver": solver,
    }
    found = usual | given
    lease_s, short_s = (_seconds(name, found[name]) for name in ("lease_s", "best_effort_lease_s"))
    if abs(lease_s / short_s - round(lease_s / short_s)) > 1e-9:
        raise UsageError(
            f"leases of {lease_s:g} s are no multiple of those without a guarantee, {short_s:g} s",
            "leave one of them out: lease_s is two quanta, best_effort_lease_s one",
        )
    return found


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise UsageError(f"--set {name}={text} is no length of a lease", "give a number of seconds")
    return seconds


def tcp_door(bind: str | None, curve_keys: Path | None) -> tuple[str, Path] | None:
    """Where to listen by TCP and the keys for that, from ``--bind`` and ``--curve-keys``; ``None``: nowhere.

    Raises
    ------
    UsageError
        If one is missing, or the endpoint or the keys cannot be used.
    """
    if bind is None and curve_keys is None:
        return None
    if bind is None:
        raise UsageError("--curve-keys without --bind", "say where to listen: --bind tcp://127.0.0.1:7311")
    host_and_port(bind)
    if curve_keys is None:
        raise UsageError(f"--bind {bind} without keys", "name a directory of keys: --curve-keys DIR")
    scheduler_keys(curve_keys)
    return bind, curve_keys.absolute()


def serve(
    directory: Path,
    setup: Setup,
    ready: Callable[[Desk], None],
    *,
    tcp: tuple[str, Path] | None = None,
    metrics_port: int | None = None,
) -> None:
    """Be the scheduler of ``directory`` until it is taken down, or told by a signal to leave its jobs alone.

    Parameters
    ----------
    ready
        Called when users may come, with the desk where they do.
    tcp
        Where to listen besides, and the directory of keys for that.
    metrics_port
        Where to serve numbers for Prometheus; 0: at any port.
    """

    def observe(event: Event, now: float, commands: Sequence[Command]) -> None:
        journal.append(event, now, quiet=not commands)

    def see(event: Event, now: float, commands: Sequence[Command]) -> None:
        witness.note(event, now, commands)
        witness.tell(event)
        if desk is not None:
            desk.notify()

    desk: Desk | None = None
    core = setup.make_core()
    witness = Witness(core)
    clock = ContinuedClock()
    with (
        _interruption() as (stopped, signalled),
        Scheduler(
            core,
            directory,
            clock=clock,
            environ=setup.environ(),
            keep_jobs=True,
            observer=observe,
            witness=see,
        ) as scheduler,
        eventlog.kept_in(directory),
        _metrics(witness, core, setup, metrics_port),
        _open_journal(directory, setup) as journal,
    ):
        past = list(journal.replay())
        clock.continue_from(max((when_s for _, when_s in past), default=0.0))
        scheduler.take_over(past, witness.note)
        scheduler.attend(signalled, lambda: None)
        scheduler.afterwards(witness.write)
        overview = Overview(core, witness.chronicle, policy=setup.policy, pid=os.getpid())
        desk = Desk(scheduler, directory, journal, overview, tcp=tcp)
        known = {"pid": os.getpid(), "devices": list(map(str, setup.devices)), "policy": setup.policy}
        eventlog.tell("started", "the scheduler can be used", details={**known, "endpoints": desk.endpoints})
        ready(desk)
        scheduler.run(lambda: desk.dismissed or bool(stopped))
        desk.close()
        eventlog.tell("ended", "the scheduler leaves", details={"dismissed": desk.dismissed})


@contextmanager
def _metrics(witness: Witness, core: Core, setup: Setup, port: int | None) -> Iterator[None]:
    """Count for Prometheus, if that is wanted."""
    if port is None:
        yield
        return
    from gpuslice import metrics  # late: it takes longer to import than all the rest

    witness.metrics = metrics.Metrics(core, witness.chronicle, setup.policy)
    with metrics.served(witness.metrics, port) as taken:
        url = f"http://{metrics.ADDRESS}:{taken}/metrics"
        eventlog.tell("metrics", f"metrics are served at {url}", details={"url": url})
        yield


def _open_journal(directory: Path, setup: Setup) -> Journal:
    """The journal of the last scheduler if it was set up alike, else a new one.

    Raises
    ------
    ConfigError
        If jobs of a scheduler that was set up differently have not ended.
    """
    journal = Journal(directory / FILE)
    written = journal.about()
    former = None if written is None else msgspec.json.decode(written, type=Setup)
    if former is not None and former != setup:
        unfinished = _unfinished(journal, former)
        journal.close()
        if unfinished:
            raise ConfigError(
                f"{', '.join(unfinished)} of the last scheduler in {directory} have not ended; it had "
                f"--devices {','.join(map(str, former.devices))} --policy {former.policy}",
                "start it with the same options, or choose another --state-dir",
            )
        _set_aside(directory)
        journal = Journal(directory / FILE)
    journal.introduce(msgspec.json.encode(setup))
    return journal


def _unfinished(journal: Journal, setup: Setup) -> list[str]:
    core = setup.make_core()
    for event, when_s in journal.replay():
        core.handle(event, when_s)
    return [job.id for job in core.jobs.values() if not (job.state.ended and job.processes_gone)]


def _set_aside(directory: Path) -> None:
    """Keep what the last scheduler wrote, under other names."""
    number = 1
    while (past := directory / f"past-{number}").exists():
        number += 1
    past.mkdir()
    for name in (FILE, "logs"):
        (directory / name).rename(past / name)
    (directory / "logs").mkdir()


def start(directory: Path, words: Sequence[str]) -> int:
    """Start ``gpuslice up`` with ``words`` in the background; returns its pid when users may come.

    Raises
    ------
    SystemExit
        If it ends instead, with its exit code; its words are on stderr.
    """
    private_directory(directory, option="--state-dir", parents=True)
    with (directory / LOG).open("ab") as log:
        begins = log.tell()
        receiving, sending = os.pipe()
        with os.fdopen(receiving, "rb") as answer:
            process = subprocess.Popen(
                [sys.executable, "-m", "gpuslice", "up", *words, "--ready-fd", str(sending)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[sending],
                start_new_session=True,
            )
            os.close(sending)
            if answer.read(1) == _READY:
                return process.pid
    code = process.wait()
    with (directory / LOG).open("rb") as log_again:
        log_again.seek(begins)
        sys.stderr.write(log_again.read().decode(errors="replace"))
    raise SystemExit(code)


def tell_ready(descriptor: int) -> None:
    """Let ``start`` return."""
    os.write(descriptor, _READY)
    os.close(descriptor)


@contextmanager
def _interruption() -> Iterator[tuple[list[int], int]]:
    """SIGINT and SIGTERM, noted in a list, and a descriptor that can be read when there was one."""
    noted: list[int] = []
    receiving, sending = os.pipe()
    os.set_blocking(sending, False)
    former_fd = signal.set_wakeup_fd(sending)
    former = {
        number: signal.signal(number, lambda number, frame: noted.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield noted, receiving
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(former_fd)
        os.close(receiving)
        os.close(sending)
