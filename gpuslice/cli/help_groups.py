"""The commands of ``gpuslice --help``, grouped by what somebody wants to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from typer.core import TyperGroup


class Group(NamedTuple):
    """Commands for one task, and a command line that shows the usual one."""

    task: str
    example: str
    commands: tuple[str, ...]


GROUPS = (
    Group("Run a script", "gpuslice run train.py --epochs 10", ("run", "adopt", "demo")),
    Group(
        "Share a box",
        "gpuslice up --devices cuda:0 && gpuslice submit train.py",
        (
            "up",
            "submit",
            "wait",
            "cancel",
            "suspend",
            "resume",
            "requeue",
            "migrate",
            "weight",
            "set",
            "down",
        ),
    ),
    Group(
        "Devices for people",
        "gpuslice pause cuda:1 --for 2h",
        ("pause", "unpause", "reserve", "unreserve", "drain", "undrain"),
    ),
    Group(
        "Look",
        "gpuslice show train-1",
        ("ps", "nodes", "show", "top", "logs", "events", "history", "timeline"),
    ),
    Group("Measure", "gpuslice profile train.py", ("profile", "skew", "colocate", "smi")),
    Group("Simulate", "gpuslice sim trace.csv --cluster 2x4 --policy 2das", ("sim", "trace")),
    Group("Machines", "gpuslice keys new DIR", ("keys", "ship")),
    Group("Other", "gpuslice doctor", ("doctor", "ramdisk")),
)


class GroupedCommands(TyperGroup):
    """A command whose help lists its sub-commands by ``GROUPS``, those of no group last."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the groups, each with its example."""
        grouped = {name for group in GROUPS for name in group.commands}
        for group in GROUPS:
            self._write(formatter, group, group.commands)
        rest = [name for name in self.commands if name not in grouped]
        if rest:
            self._write(formatter, Group("More", "gpuslice COMMAND --help", ()), rest)

    def _write(self, formatter: Any, group: Group, names: Iterable[str]) -> None:
        found = [(name, self.commands[name]) for name in names if name in self.commands]
        if not found:
            return
        with formatter.section(group.task):
            formatter.write_text(f"$ {group.example}")
            formatter.write_dl([(name, one.short_help or one.get_short_help_str()) for name, one in found])
