"""Ports for tests that need one before they listen at it, or again after they did."""

from __future__ import annotations

import random
import socket

#: Below what Linux gives to whoever asks for any port.
_RANGE = range(20_000, 32_000)


def unused_port() -> int:
    """A port of this machine that nobody uses, and that nobody is given who does not ask for it."""
    draw = random.SystemRandom()
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port := draw.choice(_RANGE)))
            except OSError:
                continue
        return port
