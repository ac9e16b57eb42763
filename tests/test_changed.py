"""Which tests ``./x quick`` runs for what has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from .changed import chosen_tests, imports, module_of


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("gpuslice/cli/up.py", "gpuslice.cli.up"),
        ("sched_core/jobs/failures.py", "gpuslice.sched_core.jobs.failures"),
        ("sched_core/jobs/__init__.py", "gpuslice.sched_core.jobs"),
        ("tests/test_layout.py", ""),
        ("docs/share.md", ""),
    ],
)
def test_a_file_is_known_by_the_name_that_tests_import(file: str, module: str) -> None:
    assert module_of(Path(file)) == module


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from gpuslice.sched_core.jobs.failures import classify", True),
        ("from gpuslice.sched_core.jobs import failures", True),
        ("from gpuslice.sched_core.jobs import (\n    bound_jobs,\n    failures,\n)", True),
        ("    import gpuslice.sched_core.jobs.failures", True),
        ("from gpuslice.sched_core.jobs import failures_of_others", False),
        ("from gpuslice.sched_core.jobs.failures_of import others", False),
    ],
)
def test_imports_are_found_in_every_spelling(line: str, found: bool) -> None:
    assert imports(line, "gpuslice.sched_core.jobs.failures") is found


def test_changed_tests_come_first_then_those_of_the_same_name_then_others_that_import() -> None:
    imported = "from gpuslice.cli import up\n"
    tests = {
        Path("tests/cli/test_a.py"): imported,
        Path("tests/cli/test_up.py"): imported,
        Path("tests/cli/test_z.py"): "",
        Path("tests/cli/test_changed_too.py"): "",
    }
    found = chosen_tests([Path("gpuslice/cli/up.py"), Path("tests/cli/test_changed_too.py")], tests)
    expected = [("test_changed_too", True), ("test_up", True), ("test_a", False)]
    assert [(test.stem, always) for test, always in found] == expected
