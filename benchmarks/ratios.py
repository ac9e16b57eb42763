"""Prints runs of suspend_latency and restore_latency as ratios to their limits, which are in the same run.

.venv/bin/python -m benchmarks.ratios benchmarks/results/FILE.json ...
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

STATES = ("adam-800", "frozen-base", "small-4000")
#: The copy into memory that is there, and the one into memory that the kernel has yet to clear.
LIMIT, FRESH_LIMIT = "limit", "limit_into_fresh_memory"
#: What all memory has to be taken back for.
INTO_FRESH_MEMORY = "resume "


def main(paths: Sequence[Path]) -> None:
    """Print the shortest time of every benchmark, and the share of the limit's rate that it reaches."""
    results: dict[str, dict[tuple[str, str], dict[str, Any]]] = defaultdict(dict)
    for result in chain.from_iterable(json.loads(path.read_text())["benchmarks"] for path in paths):
        part = Path(result["fullname"].partition("::")[0]).parent.name
        name, _, parameters = result["name"].rstrip("]").partition("[")
        state = next(state for state in STATES if state in parameters)
        rest = parameters.replace(state, "").strip("-")
        results[part][f"{name.removeprefix('test_')} {rest}".strip(), state] = result["stats"]
    for part, rows in results.items():
        states = [state for state in STATES if (LIMIT, state) in rows]
        table = Table(title=f"{part}: ms, and the limit's time over it (into fresh memory: that limit's)")
        for title in ("", *states):
            table.add_column(title, justify="right" if title else "left", no_wrap=True)
        for name in dict.fromkeys(name for name, _ in rows):
            limits = (LIMIT, FRESH_LIMIT) if name.startswith(INTO_FRESH_MEMORY) else (LIMIT,)
            cells = (
                _cell(rows.get((name, state)), [rows[limit, state] for limit in limits]) for state in states
            )
            table.add_row(name, *cells)
        Console(width=140).print(table)


def _cell(mine: dict[str, Any] | None, limits: Sequence[dict[str, Any]]) -> str:
    """The shortest of its rounds, and how near that is to each limit's shortest."""
    if mine is None:
        return ""
    shares = [f"{limit['min'] / mine['min']:.2f}" for limit in limits]
    return "  ".join([f"{mine['min'] * 1e3:.0f}", shares[0], *(f"({share})" for share in shares[1:])])


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
