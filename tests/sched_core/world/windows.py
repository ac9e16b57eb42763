"""Windows in a world (pauses, drains, reservations, others on devices): nobody is where it may not be."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from gpuslice.sched_core.lifecycle.events import DevicesUsed, Drained, Event, Paused, Reserved, Undrained
from gpuslice.verbs import DeviceUser

from .draws import Draws
from .loop import Loop
from .orders import Orders
from .record import Record
from .scenario import CALM_S, JobPlan, Scenario, Window

if TYPE_CHECKING:
    from .ranks import RankProcess

#: A job that nothing goes wrong with has parked so long after a device was closed to it.
PARKED_AFTER_S = 14.0
UNIX_S = 1_700_000_000.0
_COLLEAGUE = DeviceUser(pid=7, user="u7", command="python", nbytes=None, since_unix_s=UNIX_S)
#: Jobs that are on such a device go on.
_STAY = ("drain", "shared")
#: What the core takes for the same moment.
_ROUNDING_S = 2e-3


def with_windows(scenario: Scenario) -> Scenario:
    """Return ``scenario`` with some pauses, drains and reservations. All have ended when it is calm."""
    draws, names = Draws(scenario.seed), [str(device) for device in scenario.devices]
    found = []
    # Another pause or drain of a device would replace the first.
    kinds = draws.sample(["pause", "drain", "reserve", "reserve"], draws.number(1, 4, "windows"), "kinds")
    for number, what in enumerate(kinds):
        key = ("window", number)
        for_s = draws.between(2.0, 30.0, *key, "for")
        found.append(
            Window(
                draws.between(0.5, CALM_S - for_s - 2.0, *key, "when"),
                for_s,
                what,
                tuple(draws.sample(names, draws.number(1, len(names), *key, "count"), *key, "devices")),
                # Those of one tenant may overlap.
                "t",
            )
        )
    if what := draws.choice(["", "taken", "shared"], "users"):
        nodes = sorted({device.node for device in scenario.devices})
        node = draws.choice(nodes, "users", "node")
        there = [str(device) for device in scenario.devices if device.node == node]
        for_s = draws.between(2.0, 30.0, "users", "for")
        when_s = draws.between(0.5, CALM_S - for_s - 2.0, "users", "when")
        used = tuple(draws.sample(there, draws.number(1, len(there), "users", "count"), "users", "devices"))
        found.append(Window(when_s, for_s, what, used, ""))
    return replace(scenario, windows=tuple(found))


def begin_of(window: Window, number: int, now_s: float) -> Event:
    """Return the event that begins ``window``, the ``number``-th, for as long as it is to last from now."""
    now_unix_s, end_s = now_s + UNIX_S, window.when_s + window.for_s + UNIX_S
    match window.what:
        case "pause":
            return Paused(window.devices, now_unix_s, end_s)
        case "drain":
            return Drained(window.devices)
        case "taken" | "shared":
            left = window.devices if window.what == "taken" else ()
            users = dict.fromkeys(window.devices, (_COLLEAGUE,))
            return DevicesUsed(_node(window), now_unix_s, users, left)
        case _:
            name = f"r{number}"
            return Reserved(name, window.devices, now_unix_s, now_unix_s, end_s, window.tenant)


def end_of(window: Window) -> Event | None:
    """Return the event that ends ``window``; None if it ends by itself."""
    if window.what in ("taken", "shared"):
        return DevicesUsed(_node(window), window.when_s + window.for_s + UNIX_S, {})
    return Undrained(window.devices) if window.what == "drain" else None


def _node(window: Window) -> str:
    return window.devices[0].rpartition("/")[0]


class Closed:
    """What is closed to whom, as somebody knows who only heard the requests.

    Parameters
    ----------
    loop, record, orders
        Virtual time, what is said of violations, and what ranks were told.
    """

    def __init__(self, loop: Loop, record: Record, orders: Orders) -> None:
        self._loop, self._record, self._orders = loop, record, orders
        self._windows: list[tuple[Window, float]] = []
        self._gone: Window | None = None

    def begins(self, window: Window) -> None:
        """The scheduler has accepted ``window``."""
        self._windows.append((window, self._loop.now_s))

    def removed(self, devices: tuple[str, ...]) -> None:
        """The scheduler has accepted that it is to have all devices but these, until it has others."""
        self._windows = [one for one in self._windows if one[0] is not self._gone]
        self._gone = Window(self._loop.now_s, inf, "pause", devices, "")
        self.begins(self._gone)

    def entered(self, process: RankProcess, plan: JobPlan) -> None:
        """A rank has something on its device: no window was there when its job was given the lease."""
        epoch, device = process.orders.epoch, str(process.device).removeprefix("/")
        # Also where the rank of another node never heard of that lease: the job was given the device.
        last = self._orders.former_lease(process.job, epoch)
        granted_s = self._orders.granted_s(process.job, epoch)
        for window, from_s in self._windows:
            present = from_s < granted_s < window.when_s + window.for_s - _ROUNDING_S
            was_there = window.what in _STAY and device in last
            if present and not was_there and self._closes(window, device, plan):
                raise self._record.violated("a job has a closed device", process.name, window)

    def stays(self, process: RankProcess, plan: JobPlan) -> None:
        """A rank has something on its device, in a world where nothing goes wrong."""
        device = str(process.device).removeprefix("/")
        for window, from_s in self._windows:
            least_s = max(PARKED_AFTER_S, 4.0 * plan.step_s)
            left = from_s + least_s < self._loop.now_s < window.when_s + window.for_s
            if left and window.what not in _STAY and self._closes(window, device, plan):
                raise self._record.violated("a job did not leave a closed device", process.name, window)

    @staticmethod
    def _closes(window: Window, device: str, plan: JobPlan) -> bool:
        others = window.what != "reserve" or plan.spec.tenant != window.tenant
        return device in window.devices and others
