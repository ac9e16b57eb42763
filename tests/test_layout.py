"""The shape of the repository: import direction, no cycles, folders of a fair size, packaging."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from .layout import (
    PAGE,
    PARTS,
    ROOT,
    Graph,
    contracted,
    cycles,
    drawing,
    drawing_on,
    imports,
    module_graph,
    modules,
    modules_by_folder,
    reduced,
    room_graph,
)

FOUNDATION = {
    "types",
    "errors",
    "job_request",
    "clock",
    "wire",
    "verbs",
    "config",
    "files",
    "memory",
    "version",
}
#: What each part may import of gpuslice, besides itself and the foundation.
ALLOWED: dict[str, set[str]] = {
    "kernels": set(),
    "checkpoint": {"kernels"},
    "profiler": {"kernels"},
    "sched_core": set(),
}


MOST_MODULES = 20
#: ``gpuslice/cli`` has a file for each command.
UNLIMITED = {"gpuslice/cli"}
MOST_MODULES_OUTSIDE_ROOMS = 11
#: Modules of other packages that an ``__init__`` may refer to.
OTHERS = ("typer.",)


def sources(part: str) -> Iterator[Path]:
    yield from sorted((ROOT / part).rglob("*.py"))


def imported(source: str) -> Iterator[tuple[str, int]]:
    """Absolute names imported by ``source``, with the line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def violations(part: str, source: str, own: str = "") -> list[str]:
    """Import rules broken by ``source``, a file of ``part`` (``own``: its stem, for the foundation)."""
    found = []
    for name, line in imported(source):
        head, *rest = name.split(".")
        if head in PARTS[1:]:
            found.append(f"line {line}: bare import of {head}; write gpuslice.{head}")
        if head != "gpuslice" or not rest:
            continue
        target = rest[0]
        if part == "gpuslice":
            if own in FOUNDATION and target not in FOUNDATION:
                found.append(f"line {line}: the foundation imports gpuslice.{target}")
        elif target != part and target not in FOUNDATION | ALLOWED[part]:
            found.append(f"line {line}: {part} imports gpuslice.{target}, which is above it")
    if part == "sched_core" and any(name.split(".")[0] == "torch" for name, _ in imported(source)):
        found.append("sched_core imports torch")
    return found


@pytest.mark.parametrize("part", PARTS)
def test_imports_point_down(part: str) -> None:
    for path in sources(part):
        own = path.stem if path.parent == ROOT / "gpuslice" else ""
        assert violations(part, path.read_text(encoding="utf-8"), own) == [], path


@pytest.mark.parametrize(
    ("part", "own", "source"),
    [
        ("kernels", "", "from gpuslice.checkpoint.ramdisk.ramdisk import ramdisk"),
        ("checkpoint", "", "import gpuslice.runtime.job"),
        ("sched_core", "", "from gpuslice.kernels import device"),
        ("sched_core", "", "import torch.nn"),
        ("gpuslice", "", "import checkpoint"),
        ("profiler", "", "from kernels import device"),
        ("gpuslice", "wire", "from gpuslice.runtime.job import attach"),
    ],
)
def test_the_import_rule_can_fail(part: str, own: str, source: str) -> None:
    assert violations(part, source, own)


def test_no_modules_import_each_other() -> None:
    assert cycles(module_graph()) == set()


def test_no_rooms_import_each_other() -> None:
    assert cycles(room_graph()) == set()


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, set()),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, {frozenset("bc")}),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"e"}, "e": {"d"}}, {frozenset("abc"), frozenset("de")}),
    ],
)
def test_cycles_are_found(graph: Graph, expected: set[frozenset[str]]) -> None:
    assert cycles(graph) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from .b import f", ["gpuslice.p.a.b.f", "gpuslice.p.b.f"]),
        ("from .. import c", ["gpuslice.p.c", "gpuslice.c"]),
        ("if TYPE_CHECKING:\n    import gpuslice.d", ["gpuslice.d"] * 2),
        ("def f():\n    from gpuslice.e import g", ["gpuslice.e.g"] * 2),
    ],
)
def test_imports_are_found(source: str, expected: list[str]) -> None:
    found = [
        name for package in (True, False) for name in imports("gpuslice.p.a", source, is_package=package)
    ]
    assert found == expected


def test_a_longer_path_stands_for_an_edge() -> None:
    assert reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": {"b"}, "b": {"c"}, "c": set()}


def test_a_group_is_one_node() -> None:
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert contracted(graph, {"a": "x", "b": "x", "c": "y"}) == {"x": {"y"}, "y": set()}


def test_no_folder_is_too_full() -> None:
    sizes = {folder: len(names) for folder, names in modules_by_folder().items() if folder not in UNLIMITED}
    assert {folder: size for folder, size in sizes.items() if size > MOST_MODULES} == {}


def faces() -> Iterator[tuple[str, str]]:
    """Each sub-package, and what its ``__init__`` refers to as ``module.name``."""
    for package, path in modules().items():
        if path.name == "__init__.py":
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            names = re.findall(r"``([a-z_]+(?:\.\w+)+)``", text)
            yield from ((package, name) for name in names if not name.startswith(OTHERS))


def exists(package: str, name: str) -> bool:
    """Whether ``name`` is a module or a global of one, seen from ``package`` or from one above it."""
    module, _, attribute = name.rpartition(".")
    while package:
        if f"{package}.{name}" in modules():
            return True
        if (path := modules().get(f"{package}.{module}")) is not None:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            return attribute in {found for node in tree.body for found in names_bound_by(node)}
        package = package.rpartition(".")[0]
    return False


def names_bound_by(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_the_face_that_a_sub_package_names_exists() -> None:
    named = set(faces())
    assert ("gpuslice.sched_core.core", "core.Core") in named
    assert [found for found in sorted(named) if not exists(*found)] == []
    assert not exists("gpuslice.sched_core.core", "core.Kernel")
    assert not exists("gpuslice.sched_core.core", "kernel.Core")


def test_few_modules_of_gpuslice_lie_outside_its_rooms() -> None:
    assert len(modules_by_folder()["gpuslice"]) <= MOST_MODULES_OUTSIDE_ROOMS


def test_the_drawing_of_the_rooms_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert drawing_on(page) == drawing(), f"run `python tests/layout.py`, which renews it in {PAGE.name}"


def packages_on_disk() -> set[str]:
    names = set()
    for part in PARTS:
        for init in (ROOT / part).rglob("__init__.py"):
            relative = init.parent.relative_to(ROOT).as_posix().replace("/", ".")
            names.add(relative if part == "gpuslice" else f"gpuslice.{relative}")
    return names


def test_every_package_is_in_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(project["tool"]["setuptools"]["packages"]) == packages_on_disk()


@pytest.mark.parametrize(
    "module",
    [
        "gpuslice",
        "gpuslice.sched_core",
        "gpuslice.wire",
        "gpuslice.config",
        "gpuslice.cli",
        "gpuslice.client.client",
        "gpuslice.daemon.daemon",
    ],
)
def test_imports_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names() -> None:
    import gpuslice

    names = ["Client", "Job", "Snapshot", "__version__", "attach", "boundary", "report", "restore"]
    assert gpuslice.__all__ == names
    assert dir(gpuslice) == sorted(gpuslice.__all__)
