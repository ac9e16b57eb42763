"""The documents, and messages in the code, name files, pages and headings that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_PLACES = ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "tests/**/*.md", "gpuslice/**/*.md")
DOCUMENTS = sorted(path for place in _PLACES for path in ROOT.glob(place))
#: Entries of the changelog speak of their own time.
PRESENT = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]
_FOLDERS = ("gpuslice", "kernels", "checkpoint", "profiler", "sched_core", "tests", "benchmarks")
_SOURCE = re.compile(r"`([\w/.-]+\.(?:py|c|cu))`")
_LINK = re.compile(r"\]\(([^)#:]*)(?:#([^):]*))?\)")
_PAGE_IN_CODE = re.compile(r"\bdocs/[\w/-]+\.(?:md|html|svg)")


@cache
def sources() -> tuple[str, ...]:
    """The repository's files of code, each with a slash in front."""
    files = (path for folder in _FOLDERS for path in (ROOT / folder).rglob("*.*"))
    return tuple(f"/{path.relative_to(ROOT)}" for path in files if path.suffix in (".py", ".c", ".cu"))


def missing(text: str, folder: Path) -> Iterator[str]:
    """Sources that ``text``, a document in ``folder``, names and files it links to, which are not there."""
    yield from (name for name in _SOURCE.findall(text) if not known(name))
    for page, heading in _LINK.findall(text):
        path = folder / page if page else None
        if path is not None and not path.exists():
            yield page
        elif heading and heading not in headings(text if path is None else path.read_text(encoding="utf-8")):
            yield f"{page}#{heading}"


def headings(text: str) -> set[str]:
    """Return the anchors of the headings of ``text``, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


def known(name: str) -> bool:
    """Whether there is a source of that name, or at the end of whose path it is."""
    return any(source.endswith(f"/{name}") for source in sources())


@pytest.mark.parametrize("path", PRESENT, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_document_names_exist(path: Path) -> None:
    assert list(missing(path.read_text(encoding="utf-8"), path.parent)) == []


def test_the_rule_can_fail() -> None:
    text = "`kernels/cpu.py`, [a page](no-page.md#part), `kernels/device.py`, [another](README.md#install), "
    text += "[no part](README.md#nothing) and [neither](#here)\n"
    wrong = ["kernels/cpu.py", "no-page.md", "README.md#nothing", "#here"]
    assert list(missing(text, ROOT)) == wrong
    assert list(missing(f"# Here\n{text}", ROOT)) == wrong[:-1]


def test_pages_that_the_code_names_exist() -> None:
    named = {
        page
        for source in sources()
        for page in _PAGE_IN_CODE.findall((ROOT / source[1:]).read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert [page for page in sorted(named) if not (ROOT / page).exists()] == []
