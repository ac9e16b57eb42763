"""The identity of logs on a node: another journal may have other jobs of the same names."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from gpuslice.files import replace_file

from . import exit_record
from .endpoint import logs_directory, next_past
from .local_node import rank_endpoint
from .orphans import kill_orphans

_FILE = "identity"
_log = logging.getLogger(__name__)


def identity(logs: Path) -> str:
    """Return a text that identifies a scheduler's ``logs`` to agents. It changes with the journal."""
    if not (known := _read(logs)):
        known = secrets.token_hex(8)
        replace_file(logs / _FILE, known.encode())
    return known


def keep_only(directory: Path, known: str) -> None:
    """Set an agent's logs aside unless they belong to the scheduler with the identity ``known``.

    Other logs are moved to ``past-N``, and processes that their jobs still have are killed.
    """
    logs = logs_directory(directory)
    if _read(logs) not in ("", known):
        for job in running(logs):
            kill_orphans(job, rank_endpoint(directory))
        past = next_past(directory)
        logs.rename(past)
        _log.info("the scheduler has a new journal; the logs of earlier jobs are in %s", past)
    replace_file(logs_directory(directory) / _FILE, known.encode())


def running(logs: Path) -> tuple[str, ...]:
    """Return the jobs whose commands run, by the records in ``logs``."""
    records = {path: exit_record.read(path) for path in logs.glob("*.exit")}
    alive = [path for path, record in records.items() if record is not None and record.alive]
    return tuple(sorted({exit_record.job_of(path) for path in alive}))


def _read(logs: Path) -> str:
    try:
        return (logs / _FILE).read_text()
    except FileNotFoundError:
        return ""
