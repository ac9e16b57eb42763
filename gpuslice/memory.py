"""The memory that this machine and this process's control groups still have available."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gpuslice.errors import EnvironmentUnusableError

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_CGROUP = Path("/sys/fs/cgroup")
#: The value that means no limit.
UNLIMITED_BYTES = 1 << 62


class _Files(NamedTuple):
    """The files with a control group's limit and usage, and the page cache's lines in ``memory.stat``."""

    limit: str
    used: str
    cached: tuple[str, str]


_VERSION_2 = _Files("memory.max", "memory.current", ("active_file", "inactive_file"))
_VERSION_1 = _Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
)


def available_bytes() -> int:
    """Return the bytes that this process can still allocate before other memory has to be freed.

    Raises
    ------
    EnvironmentUnusableError
        If the kernel does not report them.
    """
    return min([_machine_bytes(), *(_left_bytes(*group) for group in _limited_groups())])


def cgroup_limit_bytes() -> int:
    """Return the smallest memory limit of this process's control groups; ``UNLIMITED_BYTES`` without one."""
    return min([UNLIMITED_BYTES, *(limit_bytes for _, _, limit_bytes in _limited_groups())])


def _machine_bytes() -> int:
    try:
        lines = _MEMINFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError as error:
        raise EnvironmentUnusableError(
            f"cannot read {_MEMINFO}: {error.strerror}", "mount /proc where the process runs"
        ) from error
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise EnvironmentUnusableError(f"{_MEMINFO} names no MemAvailable", "use Linux 3.14 or newer")


def _limited_groups() -> Iterator[tuple[Path, _Files, int]]:
    """Yield this process's control groups that have a memory limit: its own group, and groups above it."""
    for group, files in _groups():
        limit = _read(group / files.limit).strip()
        if limit.isdigit() and int(limit) < UNLIMITED_BYTES:
            yield group, files, int(limit)


@functools.cache
def _groups() -> tuple[tuple[Path, _Files], ...]:
    """Return this process's control groups that may have limits. They are looked up once."""
    found: list[tuple[Path, _Files]] = []
    for line in [*_read(_OWN_GROUPS).splitlines(), "0::/"]:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            root, files = _CGROUP, _VERSION_2
        elif "memory" in controllers.split(","):
            root, files = _CGROUP / "memory", _VERSION_1
        else:
            continue
        group = root / path.strip("/")
        places = [group, *(above for above in group.parents if above.is_relative_to(root))]
        # The root of all has no limit, and a container may see only the group that is its root.
        found += [(place, files) for place in places if _read(place / files.limit)]
    return tuple(dict.fromkeys(found))


def _left_bytes(group: Path, files: _Files, limit_bytes: int) -> int:
    """Return the bytes that a control group still allows.

    Cached files count as free, because the kernel drops them first. Pages of tmpfs do not. A group that
    cannot be read counts as one without a limit.
    """
    try:
        used_bytes = int(_read(group / files.used))
        rows = [line.split() for line in _read(group / "memory.stat").splitlines()]
        cached_bytes = sum(int(row[1]) for row in rows if row and row[0] in files.cached)
    except (ValueError, IndexError):
        return UNLIMITED_BYTES
    return limit_bytes - used_bytes + cached_bytes


def _read(path: Path) -> str:
    """Return a file of the kernel as text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
