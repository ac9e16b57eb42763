"""To which journal the logs on a node belong: another journal may have other jobs of the same names."""

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
    """What agents know a scheduler's ``logs`` by, which are set aside together with its journal."""
    if not (known := _read(logs)):
        known = secrets.token_hex(8)
        replace_file(logs / _FILE, known.encode())
    return known


def keep_only(directory: Path, known: str) -> None:
    """Let the logs in an agent's ``directory`` be those of the scheduler whose logs are ``known`` so.

    Others are kept under ``past-N``, and what still runs of their jobs is killed.
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
    """The jobs whose commands run, as their ``logs`` tell."""
    records = {path: exit_record.read(path) for path in logs.glob("*.exit")}
    alive = [path for path, record in records.items() if record is not None and record.alive]
    return tuple(sorted({exit_record.job_of(path) for path in alive}))


def _read(logs: Path) -> str:
    try:
        return (logs / _FILE).read_text()
    except FileNotFoundError:
        return ""
