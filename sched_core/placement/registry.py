"""Placements by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from gpuslice.sched_core.options import build

from .placement import Placement

_HERE = "gpuslice.sched_core.placement"

#: Module and class of each placement, by name.
PLACEMENTS: dict[str, tuple[str, str]] = {
    "count": (f"{_HERE}.placement", "Count"),
    "consolidated": (f"{_HERE}.nodes", "Consolidated"),
    "yarn": (f"{_HERE}.nodes", "Consolidated"),
    "racks": (f"{_HERE}.racks", "Racks"),
    "round-up": (f"{_HERE}.nodes", "RoundUp"),
    "local-search": (f"{_HERE}.search", "LocalSearch"),
    "affinity": (f"{_HERE}.affinity", "Affinity"),
    "topology": (f"{_HERE}.topology", "Topology"),
    "spread": (f"{_HERE}.nodes", "Spread"),
    "random": (f"{_HERE}.nodes", "Random"),
    "skew": (f"{_HERE}.nodes", "SkewAware"),
    "skew-aware": (f"{_HERE}.nodes", "SkewAware"),
    "published-yarn": (f"{_HERE}.nodes", "PublishedYarn"),
}


def make_placement(name: str, options: Mapping[str, object] | None = None) -> Placement:
    """Build a placement.

    Parameters
    ----------
    name
        As in ``--placement``.
    options
        Keyword arguments of its class; texts are converted to the declared types.

    Raises
    ------
    ConfigError
        If there is no such placement or option, or a value does not convert.
    """
    return cast(Placement, build("placement", PLACEMENTS, name, options or {}))
