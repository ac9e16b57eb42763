"""Each fact of a job is written in one module; the exceptions are listed, and the list only gets shorter."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuslice import sched_core
from gpuslice.sched_core.jobs import facts
from gpuslice.sched_core.jobs.command import Command
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.rank import Rank

ROOT = Path(sched_core.__file__).parent
#: Where jobs are live; the simulator and the policies have records of their own.
LIVE = ("allocation", "jobs", "lifecycle", "live", "journal")
RECORDS = (
    *(facts.Asked, Command, facts.Entry, facts.Lateness, facts.Processes, facts.Relocation),
    *(facts.Switch, facts.Verdict),
)
#: Facts that several modules write, and which.
EXCEPTIONS = {"pid": {"jobs/rank.py", "live/rank_sessions.py"}}  # (the latter in a copy of a Hello)


def _fields() -> set[str]:
    slots = {name for kind in (*Gang.__mro__, Rank) for name in getattr(kind, "__slots__", ())}
    return slots | {name for record in RECORDS for name in record.__struct_fields__}


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """Return what ``node`` assigns to, one target after the other."""
    match node:
        case ast.Assign(targets=targets):
            pending = list(targets)
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target) | ast.For(target=target):
            pending = [target]
        case ast.Delete(targets=targets):
            pending = list(targets)
        case _:
            return
    while pending:
        found = pending.pop()
        if isinstance(found, ast.Tuple | ast.List):
            pending += found.elts
        else:
            yield found


def _written(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Return each attribute that is written, and on what (``self``, ``job``); not as an object is made."""
    made = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name in ("__init__", "_twin")
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if node in made:
            continue
        for target in _targets(node):
            if isinstance(target, ast.Attribute):
                yield target.attr, ast.unparse(target.value)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if "setattr" in called:
            name = node.args[1]
            yield str(name.value) if isinstance(name, ast.Constant) else "any", ast.unparse(node.args[0])
        elif called.rpartition(".")[2] == "replace":
            for keyword in node.keywords:
                yield keyword.arg or "any", "a copy"


def writers() -> dict[str, set[str]]:
    """Return the modules that write each fact."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    owners = {"jobs/accounts.py", "jobs/command.py", "jobs/facts.py", "jobs/gang.py", "jobs/rank.py"}
    fields = _fields()
    # (``job.py`` writes the sums of the simulator's jobs; those of live ones are ``AccountedJob``'s.)
    paths = [path for folder in LIVE for path in sorted((ROOT / folder).glob("*.py"))]
    for path in paths:
        module = path.relative_to(ROOT).as_posix()
        for name, on in _written(ast.parse(path.read_text())):
            # What a class of another module writes on itself is its own.
            if name in fields and (on != "self" or module in owners):
                found[name].add(module)
    return dict(found)


def test_each_fact_is_written_in_one_module() -> None:
    several = {name: modules for name, modules in writers().items() if len(modules) > 1}
    print(f"{len(several)} of {len(_fields())} facts are written in several modules")
    assert several == EXCEPTIONS, "take from the list what is not true any more; add nothing"


def test_the_records_are_written_by_their_module_alone() -> None:
    found = writers()
    for record in RECORDS:
        module = record.__module__.removeprefix("gpuslice.sched_core.").replace(".", "/") + ".py"
        for name in record.__struct_fields__:
            assert found.get(name) == {module}, f"{record.__name__}.{name}"


@pytest.mark.parametrize(
    "line",
    [
        "job.lease = ()",
        "job.lateness.missed += 1",
        "job.a, (job.b, job.lease) = 1, (2, ())",
        "setattr(job, 'lease', ())",
        "object.__setattr__(job, 'lease', ())",
        "for job.lease in ():\n    pass",
        "del job.lease",
        "msgspec.structs.replace(job, lease=())",
        "job.lease: tuple[int, ...] = ()",
    ],
)
def test_every_way_to_write_is_seen(line: str) -> None:
    assert {"lease", "missed"} & {name for name, _ in _written(ast.parse(line))}
