"""What a session of tests did, over all its processes: switches by route, faults by call, budgets."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

Table = list[list[str]]


def tables(lines: Iterable[str]) -> Iterator[tuple[str, Table]]:
    """Each table with its title, the first row its head; of lines as ``cudasim.tell`` writes them."""
    switches: Counter[tuple[str, str, str]] = Counter()
    faults: dict[str, Counter[str]] = defaultdict(Counter)
    budgets: dict[tuple[str, str], tuple[str, str]] = {}
    for line in lines:
        match line.split():
            case ["switch", what, route, outcome]:
                switches[what, route, outcome] += 1
            case ["fault", name, code]:
                faults[name][code] += 1
            case ["budget", what, name, counted, allowed]:
                budgets[what, name] = counted, allowed
    yield "switches", [["", "route", "outcome", "count"], *_rows(switches)]
    codes = sorted({code for found in faults.values() for code in found})
    counts = [[name, *(str(faults[name][code] or "") for code in codes)] for name in sorted(faults)]
    yield "faults that happened, by call and code (s: sticky)", [["call", *codes], *counts]
    rows = [[*key, *value] for key, value in sorted(budgets.items())]
    yield (
        "budgets: costly calls of a warm switch of 200 small storages",
        [["", "call", "counted", "at most"], *rows],
    )


def _rows(counter: Counter[tuple[str, str, str]]) -> Table:
    return [[*key, str(count)] for key, count in sorted(counter.items())]


def markdown(table: Table) -> str:
    """The table as documents have it."""
    head, *rows = ("| " + " | ".join(row) + " |" for row in table)
    return "\n".join([head, "|" + " --- |" * len(table[0]), *rows])
