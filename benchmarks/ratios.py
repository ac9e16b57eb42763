"""Prints a run of suspend_latency and restore_latency as ratios to its limit, which is in the same run.

.venv/bin/python -m benchmarks.ratios benchmarks/results/FILE.json
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

STATES = ("adam-800", "frozen-base", "small-4000")


def main(path: Path) -> None:
    """Print the shortest time of every benchmark, and the share of the limit's rate that it reaches."""
    results: dict[str, dict[tuple[str, str], dict[str, Any]]] = defaultdict(dict)
    for result in json.loads(path.read_text())["benchmarks"]:
        part = Path(result["fullname"].partition("::")[0]).parent.name
        name, _, parameters = result["name"].rstrip("]").partition("[")
        state = next(state for state in STATES if state in parameters)
        rest = parameters.replace(state, "").strip("-")
        results[part][f"{name.removeprefix('test_')} {rest}".strip(), state] = result["stats"]
    for part, rows in results.items():
        states = [state for state in STATES if ("limit", state) in rows]
        table = Table(title=f"{part}: ms, and the limit's time over it")
        for title in ("", *states):
            table.add_column(title, justify="right" if title else "left", no_wrap=True)
        for name in dict.fromkeys(name for name, _ in rows):
            table.add_row(name, *(_cell(rows.get((name, state)), rows["limit", state]) for state in states))
        Console().print(table)


def _cell(mine: dict[str, Any] | None, limit: dict[str, Any]) -> str:
    """The shortest of its rounds, and how near that is to the limit's shortest."""
    return "" if mine is None else f"{mine['min'] * 1e3:.0f}  {limit['min'] / mine['min']:.2f}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
