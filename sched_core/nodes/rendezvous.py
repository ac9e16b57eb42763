"""Where the ranks of a job with several nodes meet: at a free port of the first rank's node."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger(__name__)


def port(path: Path) -> int:
    """The port that was chosen before, or one that is free now on every address of this machine.

    Somebody else may take it before the ranks do; then this attempt fails.

    Parameters
    ----------
    path
        Where the choice is written down, so that later calls return the same port.
    """
    with suppress(OSError, ValueError):
        return int(path.read_text())
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as server:
        found: int = server.getsockname()[1]
    try:
        path.write_text(f"{found}\n")
    except OSError as error:  # it is told all the same, but another one to whoever asks again
        _log.warning("cannot write %s: %s", path, error.strerror)
    return found
