"""Results of pytest-benchmark as they are kept: medians and spread, no samples.

.venv/bin/python -m benchmarks.summary FILE.json ...        # reduces files in place
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

_STATS = ("min", "median", "max", "iqr", "rounds")
_MACHINE = ("machine", "system", "release", "python_version", "cores", "load", "torch", "gpus")
#: Lists of numbers that are longer are samples.
_LONGEST = 4
#: More would be the noise of the clock.
_DIGITS = 4


def summarize(results: dict[str, Any]) -> None:
    """Reduce what pytest-benchmark is about to write."""
    machine = results["machine_info"]
    cpu = machine["cpu"].get("brand_raw", "") if isinstance(machine.get("cpu"), dict) else machine.get("cpu")
    results["machine_info"] = {"cpu": cpu} | {key: machine[key] for key in _MACHINE if key in machine}
    results.pop("commit_info", None)
    results["benchmarks"] = [
        {
            "fullname": one["fullname"],
            "name": one["name"],
            "extra_info": _reduced(one["extra_info"]),
            "stats": {key: _reduced(one["stats"][key]) for key in _STATS},
        }
        for one in results["benchmarks"]
    ]


def _reduced(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _reduced(item) for key, item in value.items()}
    if isinstance(value, list):
        if len(value) > _LONGEST and all(isinstance(item, (int, float)) for item in value):
            ends = {"min": min(value), "median": median(value), "max": max(value)}
            return {**_reduced(ends), "count": len(value)}
        return [_reduced(item) for item in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def main(paths: list[Path]) -> None:
    """Reduce files."""
    for path in paths:
        results = json.loads(path.read_text(encoding="utf-8"))
        summarize(results)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
