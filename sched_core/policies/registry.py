"""Policies by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Annotated, cast

import msgspec

from gpuslice.errors import ConfigError
from gpuslice.sched_core.options import Table, build, find, options_of
from gpuslice.sched_core.placement.placement import Placement
from gpuslice.sched_core.placement.registry import make_placement
from gpuslice.sched_core.policy import Policy
from gpuslice.sched_core.slowdown import Slowdown

from .defragmenting.policy import Defragmenting
from .gandiva.live_packing import Packing
from .relaxing import Relaxing, RelaxingPlacement
from .trial_pool import TrialPool

_HERE = "gpuslice.sched_core.policies"

#: Name -> module and class. The published ones exist to be compared with, see docs/simulate.md.
POLICIES: dict[str, tuple[str, str]] = {
    "fifo": (f"{_HERE}.fifo", "Fifo"),
    "fjf": (f"{_HERE}.fifo", "FitFirst"),
    "smallest": (f"{_HERE}.fifo", "SmallestFirst"),
    "sjf": (f"{_HERE}.shortest", "ShortestJob"),
    "srtf": (f"{_HERE}.shortest", "ShortestRemaining"),
    "srsf": (f"{_HERE}.shortest", "ShortestRemainingService"),
    "las": (f"{_HERE}.las", "LeastAttained"),
    "rr": (f"{_HERE}.rr", "RoundRobin"),
    "2das": (f"{_HERE}.tiresias.policy", "TwoDas"),
    "gittins": (f"{_HERE}.tiresias.policy", "TwoDGittins"),
    "yarn-cs": (f"{_HERE}.yarn_capacity", "YarnCapacity"),
    "drf": (f"{_HERE}.drf", "Drf"),
    "tetris": (f"{_HERE}.tetris", "Tetris"),
    "optimus": (f"{_HERE}.optimus", "Optimus"),
    "slaq": (f"{_HERE}.slaq", "Slaq"),
    "gandiva": (f"{_HERE}.gandiva.policy", "Gandiva"),
    "chronus": (f"{_HERE}.chronus.policy", "Chronus"),
    "themis": (f"{_HERE}.themis.policy", "Themis"),
    "published-dlas": (f"{_HERE}.published.queues", "PublishedDlas"),
    "published-gittins": (f"{_HERE}.published.queues", "PublishedGittins"),
    "published-shortest": (f"{_HERE}.published.orders", "PublishedShortest"),
    "published-expected": (f"{_HERE}.published.orders", "PublishedExpected"),
    "published-lpjf": (f"{_HERE}.published.orders", "PublishedLongestPending"),
    "published-gandiva": (f"{_HERE}.published.gandiva", "PublishedGandiva"),
}


#: Papers whose name is no policy's.
_PAPERS = {"tiresias": "its policies are 2das and gittins", "philly": "its scheduler is yarn-cs"}


#: Where distributions name policies of their own: ``name = "package.module:Class"``.
GROUP = "gpuslice.policies"


def table(name: str) -> Table:
    """Return the table that has ``name``: gpuslice's policies, or those of installed entry points."""
    if name in POLICIES:
        return POLICIES
    found = {point.name: (point.module, point.attr) for point in entry_points(group=GROUP)}
    return {**found, **POLICIES}


def policy_names() -> list[str]:
    """Return the names meant for users, in the order of their documentation."""
    return [name for name in POLICIES if not name.startswith("published-")]


#: Begins the names of a placement's options.
_PLACEMENT = "placement."


class Common(msgspec.Struct, forbid_unknown_fields=True):
    """Options that every policy takes besides its own: lessons of the Philly study.

    Attributes
    ----------
    placement
        Where jobs go, by name; its own options are ``placement.KEY``. Empty: as the policy does.
    relax_after_s
        Locality is given up by one node for every so many seconds of waiting (``Relaxing``); 0: as placed.
    trial_nodes, trial_s
        Jobs first run for ``trial_s`` on a pool of so many nodes (``TrialPool``); 0: no pool.
    pack, pack_slice_s
        Pairs of jobs share devices where live measurements say that it pays (``Packing``), tried for so long
        at a time. Only where throughput is measured, which is in a live scheduler.
    defragment
        When a job leaves, gangs move closer together where that saves more than it costs (``Defragmenting``).
    apart_nodes, apart_racks, apart_sockets
        How much slower a gang is taken to be on more nodes than needed, by what factor besides on more racks,
        and how much slower on more sockets of one node.
    """

    placement: str = ""
    relax_after_s: float = 0.0
    trial_nodes: int = 0
    trial_s: float = 300.0
    pack: bool = False
    pack_slice_s: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    defragment: bool = False
    apart_nodes: float = 1.2
    apart_racks: float = 1.0
    apart_sockets: float = 1.05


def _takes_placement(name: str) -> bool:
    """Return True if the policy takes a placement."""
    return "placement" in inspect.signature(find("policy", table(name), name)).parameters


def policy_options(name: str) -> list[str]:
    """Return the options of policy ``name``. Raise ``ConfigError`` for an unknown name."""
    if name.lower() in _PAPERS:
        raise ConfigError(f"there is no policy {name!r}", _PAPERS[name.lower()])
    return [*options_of("policy", table(name), name), *Common.__struct_fields__]


def _placement(name: str, stated: Mapping[str, object], given: Placement | None) -> Placement | None:
    """Return the placement that the options ask for, else ``given``."""
    if stated and not name:
        raise ConfigError(f"{next(iter(stated))} is of no use without a placement", "give a placement, too")
    if name and given is not None:
        raise ConfigError(f"there are two placements, {name} and {given.name}", "leave out one of them")
    options = {key.removeprefix(_PLACEMENT): value for key, value in stated.items()}
    return make_placement(name, options) if name else given


def _defragmenting(policy: Policy, settings: Common, own: Mapping[str, object]) -> Policy:
    """Return ``policy``, wrapped so that jobs are moved together if the settings ask for it."""
    if not _takes_placement(policy.name):
        raise ConfigError(
            f"policy {policy.name} places jobs itself, and moves them if need be",
            f"leave out defragment; {', '.join(filter(_takes_placement, policy_names()))} take it",
        )
    hosts = [key for key in ("node_cpus", "node_memory_gib") if own.get(key)]
    if hosts:
        raise ConfigError(f"moves do not look at {hosts[0]}", "leave out one of them and defragment")
    slowdown = Slowdown(settings.apart_nodes, racks=settings.apart_racks, sockets=settings.apart_sockets)
    return Defragmenting(policy, slowdown)


def _checked(name: str, made: object) -> Policy:
    """Return ``made`` if it is a policy. Raise ``ConfigError`` if what ``name`` stands for made none."""
    wanted = (("name", str), ("needs_durations", bool))
    wrong = [key for key, kind in wanted if not isinstance(getattr(made, key, None), kind)]
    if not callable(getattr(made, "plan", None)):
        wrong.append("plan")
    if wrong:
        raise ConfigError(
            f"policy {name} has no usable {', '.join(wrong)}",
            "give it a text `name`, a boolean `needs_durations` and a method `plan`",
        )
    return cast(Policy, made)


def make_policy(
    name: str, options: Mapping[str, object] | None = None, placement: Placement | None = None
) -> Policy:
    """Return a new policy of that name.

    Parameters
    ----------
    name
        As in ``--policy``.
    options
        Keyword arguments of the policy's class; texts are converted to the declared types. Besides, those
        of ``Common``.
    placement
        Where jobs go; the policy's own default if not given.

    Raises
    ------
    ConfigError
        If there is no such policy or option, or a value does not convert.
    """
    own = dict(options or {})
    placed = {key: own.pop(key) for key in list(own) if key.startswith(_PLACEMENT)}
    stated = {key: own.pop(key) for key in Common.__struct_fields__ if key in own}
    try:
        settings = msgspec.convert(stated, Common, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{stated} is not possible: {error}") from error
    placement = _placement(settings.placement, placed, placement)
    relaxing: RelaxingPlacement | None = None
    if settings.relax_after_s:
        if not _takes_placement(name):
            raise ConfigError(f"policy {name} places jobs itself", "leave out relax_after_s")
        if placement is not None:
            raise ConfigError(
                "relax_after_s cannot be combined with a placement", f"leave out {placement.name}"
            )
        relaxing = placement = RelaxingPlacement(settings.relax_after_s)
    if placement is not None and not _takes_placement(name):
        raise ConfigError(
            f"policy {name} places jobs itself",
            f"leave out the placement; {', '.join(filter(_takes_placement, policy_names()))} take one",
        )
    policy = _checked(name, build("policy", table(name), name, own, placement=placement))
    if relaxing is not None:
        policy = Relaxing(policy, relaxing)
    if settings.defragment:
        policy = _defragmenting(policy, settings, own)
    elif apart := [key for key in stated if key.startswith("apart_")]:
        raise ConfigError(f"{apart[0]} is of no use without defragment", "add defragment=true")
    if "trial_s" in stated and not settings.trial_nodes:
        raise ConfigError("trial_s is of no use without trial_nodes", "add trial_nodes")
    if settings.trial_nodes:
        policy = TrialPool(policy, settings.trial_nodes, settings.trial_s)
    if settings.pack:
        policy = Packing(policy, settings.pack_slice_s)
    return policy
