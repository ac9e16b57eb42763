"""The import graph of the repository: its modules, its rooms, and their drawing in docs/architecture.md.

A room is a sub-package of a part. ``python tests/layout.py`` renews the drawing.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("gpuslice", "kernels", "checkpoint", "profiler", "sched_core")
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- import graph: begin -->", "<!-- import graph: end -->"
_NAMES_PER_LINE = 3

Graph = Mapping[str, set[str]]


def module_name(path: Path) -> str:
    """The name under which the file at ``path`` is imported."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts if parts[0] == "gpuslice" else ["gpuslice", *parts])


@cache
def modules() -> dict[str, Path]:
    """Every module of the five parts, by name."""
    return {module_name(path): path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))}


def imports(name: str, source: str, *, is_package: bool) -> Iterator[str]:
    """The absolute names that ``source`` imports anywhere, also inside functions and for types only."""
    package = name if is_package else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")
            above = ".".join(base[: len(base) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (above, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)


@cache
def module_graph() -> dict[str, set[str]]:
    """Which modules each module imports. A package that is only passed through does not count."""
    graph: dict[str, set[str]] = {}
    for name, path in modules().items():
        found = imports(name, path.read_text(encoding="utf-8"), is_package=path.name == "__init__.py")
        graph[name] = {target for target in map(_module_of, found) if target} - {name}
    return graph


def _module_of(name: str) -> str:
    """The module that ``name`` is, or is an attribute of; empty if it is none of ours."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name


def part_of(module: str) -> str:
    """The part that ``module`` belongs to."""
    _, _, rest = module.partition(".")
    first = rest.partition(".")[0]
    return first if first in PARTS else "gpuslice"


def room_of(module: str) -> str:
    """The sub-package of its part that ``module`` lies in; one outside all of them is a room of its own."""
    depth = 2 if part_of(module) == "gpuslice" else 3
    return ".".join(module.split(".")[:depth])


def room_graph() -> dict[str, set[str]]:
    """Which rooms each room imports from."""
    return contracted(module_graph(), {name: room_of(name) for name in module_graph()})


def contracted(graph: Graph, group: Mapping[str, str]) -> dict[str, set[str]]:
    """``graph`` with the nodes of each group as one."""
    found: dict[str, set[str]] = {}
    for node, targets in graph.items():
        found.setdefault(group[node], set()).update(group[target] for target in targets)
    return {node: targets - {node} for node, targets in found.items()}


def reached(graph: Graph, start: str) -> set[str]:
    """The nodes that a path of one step or more leads to from ``start``."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = set(graph.get(waiting.pop(), ())) - found
        found |= new
        waiting.extend(new)
    return found


def cycles(graph: Graph) -> set[frozenset[str]]:
    """The groups of nodes that import each other, directly or through others."""
    reach = {node: reached(graph, node) for node in graph}
    return {
        frozenset(other for other in reach[node] if node in reach[other])
        for node in graph
        if node in reach[node]
    }


def reduced(graph: Graph) -> dict[str, set[str]]:
    """``graph`` without the edges that a longer path stands for."""
    found = {node: set(targets) for node, targets in graph.items()}
    for node in sorted(found):
        for target in sorted(found[node]):
            found[node].discard(target)
            if target not in reached(found, node):
                found[node].add(target)
    return found


def modules_by_folder() -> dict[str, list[str]]:
    """The modules that lie directly in each folder, without its ``__init__``."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in modules().values():
        if path.name != "__init__.py":
            found[path.parent.relative_to(ROOT).as_posix()].append(path.stem)
    return dict(found)


def drawn_groups() -> dict[str, str]:
    """The node of the drawing that each module belongs to: its room, or the others of its part beside it.

    Those beside the rooms are two nodes: what uses a room of the part, and what the rooms use.
    """
    graph = module_graph()
    rooms = {name for name, path in modules().items() if path.name == "__init__.py" and room_of(name) == name}
    rooms -= {"gpuslice", *(f"gpuslice.{part}" for part in PARTS)}
    group: dict[str, str] = {}
    for name in graph:
        if (room := room_of(name)) in rooms:
            group[name] = room
            continue
        own = {room_of(other) for other in reached(graph, name) if part_of(other) == part_of(name)}
        group[name] = f"{part_of(name)}: {'above' if own & rooms else 'below'}"
    return group


def drawing() -> str:
    """The graph of the rooms for Mermaid, without the edges that a longer path stands for."""
    group = drawn_groups()
    beside: dict[str, list[str]] = defaultdict(list)
    for name, node in group.items():
        if ": " in node and modules()[name].name != "__init__.py":
            beside[node].append(name.rpartition(".")[2])
    graph = reduced(contracted(module_graph(), group))
    names = {node: node.removeprefix("gpuslice.").replace(".", "_").replace(": ", "_") for node in graph}
    lines = ["```mermaid", "flowchart TD"]
    for part in PARTS:
        lines.append(f"  subgraph {part}")
        prefix = "gpuslice." if part == "gpuslice" else f"gpuslice.{part}."
        for node in sorted(graph):
            if node.startswith(f"{part}: "):
                lines.append(f'    {names[node]}["{_listed(beside[node]) or "__init__"}"]')
            elif node.startswith(prefix) and part_of(node) == part:
                lines.append(f'    {names[node]}["{node.removeprefix(prefix)}/"]')
        lines.append("  end")
    for node in sorted(graph):
        lines.extend(f"  {names[node]} --> {names[target]}" for target in sorted(graph[node]))
    return "\n".join([*lines, "```"])


def _listed(names: list[str]) -> str:
    rows = [names[at : at + _NAMES_PER_LINE] for at in range(0, len(names), _NAMES_PER_LINE)]
    return "<br/>".join(", ".join(row) for row in rows)


def drawing_on(page: str) -> str:
    """What stands between the markers of ``page``."""
    return page.partition(BEGIN)[2].partition(END)[0].strip()


def renew() -> None:
    """Put the present drawing between the markers of docs/architecture.md."""
    page = PAGE.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} lacks {BEGIN} or {END}; put both where the drawing shall be")
    PAGE.write_text(f"{before}{BEGIN}\n{drawing()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    renew()
