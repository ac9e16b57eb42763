"""How much memory this machine, and the control group that this process is in, can still give."""

from __future__ import annotations

from pathlib import Path

from gpuslice.errors import EnvironmentUnusableError

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
#: What stands for no limit.
UNLIMITED_BYTES = 1 << 62


def available_bytes() -> int:
    """Bytes that new pages may take before something else has to give way.

    Raises
    ------
    EnvironmentUnusableError
        If the kernel does not say.
    """
    return min(_machine_bytes(), _cgroup_bytes())


def _machine_bytes() -> int:
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise EnvironmentUnusableError(f"{_MEMINFO} names no MemAvailable", "use Linux 3.14 or newer")


def _cgroup_bytes() -> int:
    """What this process's memory cgroup (version 2) still allows; a huge number where there is no limit.

    The kernel drops cached files before it says no; pages of tmpfs are not among them.
    """
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        current = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        lines = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return UNLIMITED_BYTES
    if limit == "max":
        return UNLIMITED_BYTES
    statistics = dict(line.split() for line in lines)
    return int(limit) - current + int(statistics["active_file"]) + int(statistics["inactive_file"])
