"""The modules that a rank imports while it waits for its first lease."""

from __future__ import annotations

import importlib
import warnings
from contextlib import suppress


def import_ahead() -> None:
    """Import what torch needs for the first optimizer, which takes seconds, before there is a lease.

    With a lease, other jobs would wait for the device meanwhile (docs/decisions/import-ahead.md).
    """
    # If the import fails, torch reports it when the script needs the module.
    with warnings.catch_warnings(action="ignore"), suppress(ImportError):
        importlib.import_module("torch._dynamo")
