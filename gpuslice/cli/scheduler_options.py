"""The options before a command that name a scheduler elsewhere, as the user has typed them."""

from __future__ import annotations

#: Values by option: ``--connect`` and ``--curve-keys``.
named_scheduler: dict[str, str] = {}
