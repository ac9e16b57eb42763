"""What a rank imports while it waits for its first lease."""

from __future__ import annotations

import importlib
import warnings
from contextlib import suppress


def import_ahead() -> None:
    """Import what torch does when the first optimizer is made: seconds that nobody has to wait for now.

    On the device it would keep others waiting (docs/decisions/import-ahead.md).
    """
    # Whatever is wrong with it, the script will hear of it from torch, or never need it.
    with warnings.catch_warnings(action="ignore"), suppress(ImportError):
        importlib.import_module("torch._dynamo")
