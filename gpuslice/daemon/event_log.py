"""The scheduler's log: one JSON object per line, in a few files of bounded size.

Everything that is logged under the name ``gpuslice`` goes there. A record may carry ``event``, ``job`` and
``details`` (``extra=``); the keys are documented in docs/json.md and stay.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

import msgspec

FILE = "scheduler.jsonl"
_MOST_BYTES = 8 << 20
_OLDER_FILES = 3
_logger = logging.getLogger("gpuslice")


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return ``record`` as a line. A traceback becomes part of ``details``."""
        details = dict(getattr(record, "details", {}))
        if record.exc_info:
            details["traceback"] = self.formatException(record.exc_info)
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", "message"),
            "job": getattr(record, "job", ""),
            "message": record.getMessage(),
            "details": details,
        }
        return msgspec.json.encode(line, enc_hook=str).decode()


class _Files(RotatingFileHandler):
    """The files of the log: a new one is begun when one is full, and the oldest is removed."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop a record that cannot be written, for example on a full disk. Nothing depends on the log."""


@contextmanager
def kept_in(directory: Path, *, most_bytes: int = _MOST_BYTES) -> Iterator[None]:
    """Write the log into ``directory`` within the context, in at most four files of ``most_bytes``."""
    handler = _Files(directory / FILE, maxBytes=most_bytes, backupCount=_OLDER_FILES, encoding="utf-8")
    handler.setFormatter(JsonLines())
    former = _logger.level
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        _logger.removeHandler(handler)
        _logger.setLevel(former)
        # A log that cannot be written, on a full disk say, must not hide why the scheduler ends.
        with contextlib.suppress(OSError):
            handler.close()


def tell(event: str, message: str, *, job: str = "", details: Mapping[str, object] | None = None) -> None:
    """Log an event."""
    _logger.info(message, extra={"event": event, "job": job, "details": dict(details or {})})
