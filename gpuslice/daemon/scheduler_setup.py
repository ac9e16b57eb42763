"""What a scheduler is started with, and how that is read from what ``gpuslice up`` was told."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil

from gpuslice.checkpoint.files import more_room
from gpuslice.config import format_size, parse_size, variable
from gpuslice.daemon.interference_profiles import PairPrior, by_scripts
from gpuslice.errors import ConfigError, UsageError
from gpuslice.launch.visible_gpus import VISIBLE, all_visible, visible
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.nodes.curve import scheduler_keys
from gpuslice.sched_core.nodes.endpoint import host_and_port
from gpuslice.sched_core.policies.gandiva.live_packing import Packing
from gpuslice.sched_core.policies.registry import POLICIES, make_policy, policy_options
from gpuslice.sched_core.policy import Policy
from gpuslice.sched_core.switch_cost_model import SWITCH_SHARE
from gpuslice.types import MAX_SECONDS, ByteCount, Count, DeviceName, Label, PathText, Word

if TYPE_CHECKING:  # NVML only where there are GPUs
    from gpuslice.kernels.nvml import Gpu

#: The number of the core, in every journal. It grows when a core no longer does with the events of a journal
#: what the core that wrote them did.
CORE_VERSION = 8
#: Of journals that name none.
_FIRST_CORE_VERSION = 1
#: More devices than there can be; `isdigit` would take digits that `int` does not.
_QUOTA = re.compile(r"[0-9]{1,9}")
_SHORTEST_LEASE_S = 1e-3
#: A file system with less has hardly room for snapshots.
_SMALL_BYTES = 1 << 30
#: What ``--quantum`` is called in policies.
_QUANTA = ("quantum_s", "first_slice_s")
#: Policies that must know how long jobs run, for which what jobs tell and do is enough.
_ESTIMATES_DO = ("srtf", "srsf", "sjf", "chronus", "themis")


@dataclass(frozen=True)
class Setup:
    """The options with which a scheduler was started.

    Attributes
    ----------
    devices
        The devices that the scheduler gives to jobs.
    policy, options
        The policy's name, and its own settings as text.
    ramdisk_limit
        Most bytes that the jobs' snapshots may take together, ``8G`` style; empty for the usual.
    switch_share
        Part of the time that switching may take.
    quotas
        How many devices the jobs of a tenant may ask for together.
    tenant_ramdisk
        Most bytes that the snapshots of a tenant's jobs may take together, ``8G`` style.
    spill_dir
        Where snapshots of dead and parked jobs go when the RAM disk is full; empty for nowhere.
    spill_limit
        Most bytes that they may take there, ``50G`` style; empty for what its file system has.
    device_memory_bytes
        Memory of each device, of the smallest if they differ; 0: not known.
    profiles
        What is known of pairs of scripts, for a policy that packs.
    sockets
        On how many sockets the devices lie, in equal parts and in their order.
    starts_ahead
        True if a job that changes its node has its process started there before its state has come.
    core_version
        Version of the core that makes the decisions.
    """

    devices: tuple[DeviceName, ...]
    policy: Word = "rr"
    options: Mapping[Word, Word] = field(default_factory=dict)
    ramdisk_limit: Word = ""
    switch_share: float = SWITCH_SHARE
    quotas: Mapping[Label, Count] = field(default_factory=dict)
    device_memory_bytes: ByteCount = 0
    tenant_ramdisk: Mapping[Label, Word] = field(default_factory=dict)
    spill_dir: PathText = ""
    spill_limit: Word = ""
    profiles: tuple[PairPrior, ...] = ()
    sockets: Count = 1
    starts_ahead: bool = False
    core_version: Count = CORE_VERSION

    @property
    def has_state(self) -> bool:
        """True if jobs have state on the devices, and so snapshots: not all devices are ``null``."""
        return any(device.kind != "null" for device in self.devices)

    def make_policy(self) -> Policy:
        """Return the policy.

        Raises
        ------
        ConfigError
            If the policy or an option does not exist, or it needs to know how long jobs run.
        UsageError
            If there are profiles, and it does not pack.
        """
        policy = make_policy(self.policy, self.options)
        if self.profiles:
            if not isinstance(policy, Packing):
                raise UsageError("--profiles has no effect: this scheduler packs no jobs", "add --pack")
            policy.priors = by_scripts(self.profiles)
        if policy.needs_durations and self.policy in POLICIES and self.policy not in _ESTIMATES_DO:
            raise ConfigError(
                f"policy {self.policy} needs to know how long jobs run, which is not known here",
                f"choose one that does not, such as rr, 2das or las, or of {', '.join(_ESTIMATES_DO)}",
            )
        return policy

    def make_core(self) -> Core:
        """Return a core without jobs. Raises what ``make_policy`` raises."""
        return Core(
            self.devices,
            self.make_policy(),
            switch_share=self.switch_share,
            quotas=self.quotas,
            device_memory_bytes=self.device_memory_bytes,
            sockets=self.sockets,
            make_policy=lambda name, options: replace(self, policy=name, options=options).make_policy(),
            starts_ahead=self.starts_ahead,
        )

    def environ(self) -> dict[str, str]:
        """Return the variables that every job gets."""
        values = {
            "cpu_slots": str(_slots(self.devices)),
            "ramdisk_limit": self.ramdisk_limit,
            "spill_dir": self.spill_dir,
            "spill_limit": self.spill_limit,
        }
        named = {variable(name): value for name, value in values.items() if value not in ("", "0")}
        if any(device.kind == "cuda" for device in self.devices):
            gpus = _all_gpus()
            named |= {variable("visible_gpus"): gpus, VISIBLE: gpus} if gpus else {}
        return named


def read_setup(written: bytes) -> Setup:
    """Return the scheduler's options that a journal begins with."""
    fields: dict[str, object] = msgspec.json.decode(written)
    return msgspec.convert({"core_version": _FIRST_CORE_VERSION} | fields, Setup)


def _all_gpus() -> str:
    from gpuslice.kernels.nvml import read_driver

    return all_visible([gpu.index for gpu in read_driver().gpus], os.environ.get(VISIBLE))


def _visible_gpus() -> list[Gpu]:
    from gpuslice.kernels.nvml import read_driver

    return visible(read_driver().gpus, os.environ)


def oversubscription_warning(devices: Sequence[DeviceName], cores: int | None = None) -> str:
    """Return a warning if ``devices`` has more host slots than there are cores; else an empty text.

    ``cores`` are those that this process may use; asked for if not given.
    """
    slots = _slots(devices)
    cores = cores or len(os.sched_getaffinity(0))
    if slots <= cores:
        return ""
    shared = f"{slots} slots share {cores} core{'s' if cores > 1 else ''}"
    return f"{shared}: jobs that run at the same time slow each other down"


def small_ramdisk_warning(ramdisk: Path) -> str:
    """Return a warning if the RAM disk's file system is too small for most jobs; else an empty text."""
    status = os.statvfs(ramdisk)
    total_bytes = status.f_blocks * status.f_frsize
    if total_bytes >= _SMALL_BYTES:
        return ""
    return f"the RAM disk {ramdisk} is on a file system of {format_size(total_bytes)}: {more_room(ramdisk)}"


def _slots(devices: Sequence[DeviceName]) -> int:
    """Return how many slots the host must have, so that ``devices`` exist."""
    return max(((device.index or 0) + 1 for device in devices if device.kind == "cpu"), default=0)


def device_memory(devices: Sequence[DeviceName]) -> int:
    """Return the bytes of memory of the smallest device; slots share the host's. 0 if not known."""
    sizes: list[int] = []
    slots = sum(device.kind == "cpu" for device in devices)
    if slots:
        sizes.append(psutil.virtual_memory().total // slots)
    if any(device.kind == "cuda" for device in devices):
        gpus = _visible_gpus()
        numbers = [device.index or 0 for device in devices if device.kind == "cuda"]
        totals = [gpus[number].total_bytes for number in numbers if number < len(gpus)]
        sizes += [total for total in totals if total]
    return min(sizes, default=0)


def quotas(settings: Sequence[str]) -> dict[str, int]:
    """Return the number of devices of each tenant, from texts like ``tenant=2``.

    Raises
    ------
    UsageError
        If one is not that.
    """
    found = _by_tenant(
        "--quota", settings, "DEVICES", "vision=2", lambda _, devices: _QUOTA.fullmatch(devices) is not None
    )
    return {tenant: int(devices) for tenant, devices in found.items()}


def check_switch_share(given: str, share: float) -> None:
    """Raise ``UsageError`` if ``share``, which was ``given`` in these words, is no share of the time."""
    if not 0 <= share < 1:
        raise UsageError(
            f"{given} is not a share of the time", "give a number from 0 to below 1, such as 0.03"
        )


def tenant_ramdisk(settings: Sequence[str]) -> dict[str, str]:
    """Return the RAM disk limit of each tenant in bytes, from texts like ``tenant=8G``.

    Raises
    ------
    UsageError
        If one is not that.
    """
    named = _by_tenant("--tenant-ramdisk", settings, "SIZE", "vision=8G", lambda *words: all(words))
    for size in named.values():
        parse_size(size)
    return named


def _by_tenant(
    option: str, settings: Sequence[str], value: str, example: str, fits: Callable[[str, str], bool]
) -> dict[str, str]:
    """Return the value of each tenant, from texts like ``tenant=value``. Of two, the last counts."""
    found: dict[str, str] = {}
    for setting in settings:
        tenant, _, text = setting.partition("=")
        if not fits(tenant, text):
            raise UsageError(f"{option} {setting} is not TENANT={value}", f"write for instance {example}")
        found[tenant] = text
    return found


def options(
    policy: str,
    settings: Sequence[str],
    quantum_s: float | None,
    *,
    pack: bool = False,
    defragment: bool = False,
    placement: str = "",
) -> dict[str, str]:
    """Return the policy's settings from ``--set``, ``--quantum``, ``--pack`` and the like.

    Gandiva packs anyway, unless told not to.

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
    if pack or (policy == "gandiva" and _gandiva_packs(found)):
        found.setdefault("pack", "true")
        found.setdefault("pack_slice_s", str(2.0 if quantum_s is None else quantum_s))
    if defragment:
        found.setdefault("defragment", "true")
    if placement:
        found["placement"] = placement
    if policy == "chronus":
        return _leases(found, default_quantum_s(policy) if quantum_s is None else quantum_s)
    takes = [key for key in _QUANTA if key in policy_options(policy)]
    for key in takes:
        found.setdefault(key, str(default_quantum_s(policy) if quantum_s is None else quantum_s))
    if quantum_s is not None and not takes:
        raise UsageError(f"policy {policy} has no quantum", "leave out --quantum; see --set")
    return found


def quantum_of(policy: str, given: Mapping[str, str]) -> float | None:
    """Return the quantum in the options that ``options`` has returned for ``policy``. None: it has none."""
    keys = ("best_effort_lease_s",) if policy == "chronus" else _QUANTA
    found = [given[key] for key in keys if key in given]
    return float(found[0]) if found else None


def default_quantum_s(policy: str) -> float:
    """Return the quantum of ``policy``, if it has one, without ``--quantum``."""
    return 60.0 if policy == "chronus" else 2.0


def has_quantum(policy: str) -> bool:
    """Return True if ``policy`` takes ``--quantum``."""
    return policy == "chronus" or not set(_QUANTA).isdisjoint(policy_options(policy))


def _gandiva_packs(given: Mapping[str, str]) -> bool:
    return given.get("packing", "true").lower() in ("true", "1") and given.get("mode") != "reactive"


def _leases(given: dict[str, str], quantum_s: float) -> dict[str, str]:
    """Return the settings of `chronus`, with leases of whole quanta and every default written out.

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
    return {"milp_seconds": str(lease_s / 8), **found}


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not _SHORTEST_LEASE_S <= seconds <= MAX_SECONDS:
        raise UsageError(f"--set {name}={text} is no length of a lease", "give a number of seconds")
    return seconds


def tcp_listener(bind: str | None, curve_keys: Path | None) -> tuple[str, Path] | None:
    """Return the TCP endpoint and the directory of keys that the options name; None for no TCP.

    Raises
    ------
    UsageError
        If one is missing, or the endpoint or the keys cannot be used.
    """
    if bind is None and curve_keys is None:
        return None
    if bind is None:
        raise UsageError(
            "--curve-keys is given without --bind", "name where to listen: --bind tcp://127.0.0.1:7311"
        )
    host_and_port(bind)
    if curve_keys is None:
        raise UsageError(f"--bind {bind} needs keys", "name a directory of keys: --curve-keys DIR")
    scheduler_keys(curve_keys)
    return bind, curve_keys.absolute()
