"""Changes of settings as people write them: ``policy=2das quantum=30s 2das.thresholds=6,18``.

The names are the options of ``gpuslice up``. An option of the policy is ``POLICY.NAME``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from gpuslice.config import parse_duration
from gpuslice.daemon import scheduler_setup
from gpuslice.daemon.device_lists import parse_devices
from gpuslice.errors import UsageError
from gpuslice.sched_core.lifecycle.events import SettingsChanged
from gpuslice.sched_core.options import nearest
from gpuslice.sched_core.policies.registry import Common, policy_options

from .present import Settings

#: What can be changed while the scheduler runs, besides the options of the policy.
NAMES = (
    *("devices", "policy", "quantum", "pack", "defragment", "placement", "quota", "switch-share"),
    *("grace", "wait-for-node", "prestart"),
)
_OF_THE_POLICY = frozenset({"policy", "quantum", "pack", "defragment", "placement"})
#: Options of ``up`` that jobs were accepted or started with.
_WITH_JOBS = ("prefer", "profiles", "ramdisk-limit", "sockets", "spill-dir", "spill-limit", "tenant-ramdisk")
#: Options of ``up`` that a scheduler reads when it starts.
_AT_START = (
    *("accept-loss", "agent-port", "bind", "curve-keys", "foreground", "foreign", "foreign-grace"),
    *("foreign-ignore", "metrics-port", "node"),
    *("node-timeout", "ray", "replicate-every", "state-dir", "without"),
)
_FLAGS = {"true": True, "false": False}
_COUNT = re.compile(r"[0-9]{1,6}")
#: Options that ``--quantum`` sets, under one policy or another.
_OF_THE_QUANTUM = (
    *("quantum_s", "first_slice_s", "pack_slice_s"),
    *("lease_s", "best_effort_lease_s", "milp_seconds"),
)
_COMMON = frozenset(Common.__struct_fields__)


_FIELDS = {"quota": "quotas", "grace": "grace_s", "wait-for-node": "wait_for_node_s"}


def field_of(word: str) -> str:
    """Return the field of ``SettingsChanged`` that KEY=VALUE is about. All that a policy takes is one."""
    key = word.partition("=")[0]
    if key in _OF_THE_POLICY or "." in key:
        return "options"
    return _FIELDS.get(key, key.replace("-", "_"))


def change_of(words: Sequence[str], present: Settings) -> SettingsChanged:
    """Return the change that ``words``, each KEY=VALUE, ask for. What is as it is already is left out.

    Raises
    ------
    UsageError
        If one of them is no setting, cannot be changed now, or has no such value.
    """
    given: dict[str, list[str]] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"{word} is not KEY=VALUE", "write for instance policy=las")
        _check_name(key, present)
        if key in given and key != "quota":
            raise UsageError(f"{key} is given twice", "give it once")
        given.setdefault(key, []).append(value)
    fields: dict[str, object] = {}
    for key, read in _READERS.items():
        if key in given:
            fields |= read(given[key], present)
    settings = {key: values[-1] for key, values in given.items() if key in _OF_THE_POLICY or "." in key}
    # Policies never see the number of devices grow: another begins.
    if settings or "devices" in fields:
        fields |= _policy(settings, present)
        if "devices" not in fields and (fields["policy"], fields["options"]) == (
            present.setup.policy,
            present.setup.options,
        ):
            del fields["policy"], fields["options"]
    return SettingsChanged(**fields)  # type: ignore[arg-type]  # of their types by their readers


def _check_name(key: str, present: Settings) -> None:
    """Raise ``UsageError`` if ``key`` is no setting, or none that can be changed while the scheduler runs."""
    if key in NAMES or "." in key:
        return
    if key in _WITH_JOBS:
        raise UsageError(
            f"{key} cannot be changed while there are jobs that were submitted under it",
            f"`gpuslice down --drain`, then `gpuslice up` with another --{key}",
        )
    if key in _AT_START:
        raise UsageError(
            f"{key} is read when the scheduler starts",
            f"end the scheduler by `kill`, which leaves its jobs alone; then `gpuslice up` with --{key}",
        )
    if key == "set":
        raise UsageError(
            "set is no setting", f"write an option of the policy as {present.setup.policy}.NAME=VALUE"
        )
    raise UsageError(f"there is no setting {key!r}", nearest(key, NAMES))


# Settings that are not the policy's.


def _devices(values: Sequence[str], present: Settings) -> dict[str, object]:
    setup = present.setup
    if any(device.node for device in setup.devices):
        raise UsageError(
            "devices cannot be changed while the scheduler has other nodes",
            "pause devices of them, or start it again with --without NODE",
        )
    if setup.sockets > 1:
        raise UsageError(
            f"devices cannot be changed under --sockets {setup.sockets}", "pause devices: `gpuslice pause`"
        )
    wanted = parse_devices(values[-1])
    kinds = {device.kind for device in setup.devices}
    if other := next((device for device in wanted if device.kind not in kinds), None):
        raise UsageError(
            f"{other} cannot be added: the scheduler was started with {' and '.join(sorted(kinds))} devices",
            "name devices of that kind, or start a scheduler of its own for it",
        )
    new = [device for device in wanted if device not in setup.devices and device.kind == "cuda"]
    size = scheduler_setup.device_memory(new)
    if size and size < setup.device_memory_bytes:
        raise UsageError(
            f"{new[0]} has less memory than the other devices, which jobs may have been promised",
            "leave it out, or start a scheduler of its own for it",
        )
    same = set(wanted) == set(setup.devices)
    return {} if same else {"devices": tuple(map(str, wanted))}


def _quotas(values: Sequence[str], present: Settings) -> dict[str, object]:
    """Return the quotas with those of ``values`` replaced. ``TENANT=`` ends one."""
    found = dict(present.setup.quotas)
    for value in values:
        tenant, equals, devices = value.partition("=")
        if equals and not devices:
            found.pop(tenant, None)
        else:
            found |= scheduler_setup.quotas([value])
    return {} if found == present.setup.quotas else {"quotas": found}


def _switch_share(values: Sequence[str], present: Settings) -> dict[str, object]:
    try:
        share = float(values[-1])
    except ValueError:
        share = -1.0
    scheduler_setup.check_switch_share(f"switch-share={values[-1]}", share)
    return {} if share == present.setup.switch_share else {"switch_share": share}


def _grace(values: Sequence[str], present: Settings) -> dict[str, object]:
    grace_s = parse_duration(values[-1])
    return {} if grace_s == present.defaults.grace_s else {"grace_s": grace_s}


def _wait_for_node(values: Sequence[str], present: Settings) -> dict[str, object]:
    wait_s = parse_duration(values[-1], may_be_zero=True)
    return {} if wait_s == present.defaults.wait_for_node_s else {"wait_for_node_s": wait_s}


def _prestart(values: Sequence[str], present: Settings) -> dict[str, object]:
    if not _COUNT.fullmatch(values[-1]):
        raise UsageError(f"prestart={values[-1]} is no number of jobs", "write for instance prestart=2")
    count = int(values[-1])
    return {} if count == present.prestart else {"prestart": count}


_READERS: Mapping[str, Callable[[Sequence[str], Settings], dict[str, object]]] = {
    "devices": _devices,
    "quota": _quotas,
    "switch-share": _switch_share,
    "grace": _grace,
    "wait-for-node": _wait_for_node,
    "prestart": _prestart,
}


# The policy and its options.


def _policy(given: Mapping[str, str], present: Settings) -> dict[str, object]:
    """Return the policy and all its options, of which ``given`` names some."""
    setup = present.setup
    name = given.get("policy", setup.policy)
    known = policy_options(name)
    options = _kept(name, setup)
    quantum_s = _quantum(given, name, present)
    if "quantum" in given:
        options = {key: text for key, text in options.items() if key not in _OF_THE_QUANTUM}
    for flag in ("pack", "defragment"):
        if flag in given:
            options |= {flag: "true" if _flag(flag, given[flag]) else "false"}
    if given.get("pack") == "false":
        options.pop("pack_slice_s", None)
    if "placement" in given:
        options["placement"] = given["placement"]
    for key, text in given.items():
        policy, dot, option = key.partition(".")
        if not dot:
            continue
        if policy != name:
            raise UsageError(
                f"{key} is an option of policy {policy}, and the policy is {name}",
                f"add policy={policy}, or write {name}.{option}",
            )
        if option not in known and not option.startswith("placement."):
            raise UsageError(f"policy {name} has no option {option!r}", nearest(option, known))
        options[option] = text
    # An empty text is the default.
    settings = [f"{key}={text}" for key, text in options.items() if text != ""]
    packs = options.get("pack") == "true"
    return {
        "policy": name,
        "options": scheduler_setup.options(name, settings, quantum_s, pack=packs),
    }


def _kept(name: str, setup: scheduler_setup.Setup) -> dict[str, str]:
    """Return the options that hold under policy ``name``, too: all, or those that all policies take."""
    if name == setup.policy:
        return dict(setup.options)
    kept = {
        key: text for key, text in setup.options.items() if key in _COMMON or key.startswith("placement.")
    }
    if setup.policy == "gandiva":  # which packs without being asked
        kept = {key: text for key, text in kept.items() if not key.startswith("pack")}
    return kept


def _quantum(given: Mapping[str, str], name: str, present: Settings) -> float | None:
    """Return the quantum for policy ``name``: the given one, or the present one if it is not a default."""
    if "quantum" in given:
        return parse_duration(given["quantum"])
    setup = present.setup
    quantum_s = scheduler_setup.quantum_of(setup.policy, setup.options)
    usual = quantum_s == scheduler_setup.default_quantum_s(setup.policy)
    return None if usual or not scheduler_setup.has_quantum(name) else quantum_s


def _flag(name: str, text: str) -> bool:
    if text not in _FLAGS:
        raise UsageError(f"{name}={text} is neither true nor false", f"write {name}=true or {name}=false")
    return _FLAGS[text]
