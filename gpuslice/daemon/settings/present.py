"""The settings that hold now: those of ``gpuslice up``, and over them all that ``gpuslice set`` changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from gpuslice.daemon.scheduler_setup import Setup, quantum_of
from gpuslice.sched_core.job import DEFAULTS, JobDefaults
from gpuslice.sched_core.lifecycle.events import SettingsChanged
from gpuslice.types import DeviceName
from gpuslice.verbs import SettingInfo

#: The fields of ``Setup`` that a ``SettingsChanged`` can change; two of them only together.
IN_SETUP = ("devices", "policy", "options", "quotas", "switch_share")


@dataclass(frozen=True)
class Settings:
    """The settings of a scheduler.

    Attributes
    ----------
    setup
        What its journal begins with, with what was changed since.
    defaults
        The times of jobs that are submitted without them.
    prestart
        How many jobs are started before their turn. None: about one a device.
    changed
        The fields that were changed since the journal began.
    """

    setup: Setup
    defaults: JobDefaults = DEFAULTS
    prestart: int | None = None
    changed: frozenset[str] = field(default_factory=frozenset)

    def after(self, event: SettingsChanged) -> Settings:
        """Return the settings after ``event``."""
        fields = fields_of(event)
        in_setup = {name: value for name, value in fields.items() if name in IN_SETUP}
        if event.devices is not None:
            in_setup["devices"] = tuple(map(DeviceName.parse, event.devices))
        times = {name: value for name, value in fields.items() if name in ("grace_s", "wait_for_node_s")}
        return replace(
            self,
            setup=replace(self.setup, **in_setup),
            defaults=self.defaults._replace(**times),
            prestart=self.prestart if event.prestart is None else event.prestart,
            changed=self.changed | fields.keys(),
        )

    def summary(self) -> str:
        """Return in one line what was changed since the journal began. Empty if nothing was."""
        return ", ".join(f"{one.name}={one.value}" for one in self.shown() if one.changed and one.value)

    def shown(self) -> tuple[SettingInfo, ...]:
        """Return all settings for people, by the names that ``gpuslice set`` takes."""
        setup, quantum_s = self.setup, quantum_of(self.setup.policy, self.setup.options)
        found = [
            ("devices", ",".join(map(str, setup.devices)), "devices"),
            ("policy", setup.policy, "policy"),
            ("quantum", "" if quantum_s is None else f"{quantum_s:g}s", "options"),
        ]
        found += [(f"{setup.policy}.{name}", text, "options") for name, text in sorted(setup.options.items())]
        found += [(f"quota {tenant}", str(most), "quotas") for tenant, most in sorted(setup.quotas.items())]
        found += [
            ("switch-share", f"{setup.switch_share:g}", "switch_share"),
            ("grace", f"{self.defaults.grace_s:g}s", "grace_s"),
            ("wait-for-node", f"{self.defaults.wait_for_node_s:g}s", "wait_for_node_s"),
            ("prestart", "" if self.prestart is None else str(self.prestart), "prestart"),
        ]
        return tuple(
            SettingInfo(name=name, value=value, changed=source in self.changed)
            for name, value, source in found
        )


def fields_of(event: SettingsChanged) -> dict[str, Any]:
    """Return the fields that ``event`` changes."""
    values = {name: getattr(event, name) for name in event.__struct_fields__}
    return {name: value for name, value in values.items() if value is not None}


def after_all(settings: Settings, events: Iterable[SettingsChanged]) -> Settings:
    """Return the settings after ``events``."""
    for event in events:
        settings = settings.after(event)
    return settings
