"""``gpuslice top``: the live screen."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from gpuslice.client.client import Client
from gpuslice.config import parse_duration
from gpuslice.errors import EnvironmentUnusableError, UsageError

from .client_commands import connect
from .options import StateDir

_QUIT = frozenset(b"qQ\x1b\x04")


def command(
    interval: Annotated[str, typer.Option(metavar="1s", help="How often the screen is drawn anew.")] = "1s",
    state_dir: StateDir = None,
) -> None:
    """Show devices, queues and jobs as they change.

    `q` or Ctrl-C ends it. It needs a terminal; elsewhere use `gpuslice ps --watch`.
    """
    interval_s = parse_duration(interval)
    if not sys.stdout.isatty():
        raise UsageError("top needs a terminal", "use `gpuslice ps --watch`, or `gpuslice ps --json`")
    with connect(state_dir) as client, _keys() as quit_within:
        watch(client, interval_s, quit_within)


def watch(client: Client, interval_s: float, quit_within: Callable[[float], bool]) -> None:
    """Draw the scheduler's status again and again, until ``quit_within(seconds)`` returns True."""
    from rich.console import Console
    from rich.live import Live

    from .dashboard import picture

    console = Console()
    status = client.status()
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        notice = ""
        while True:
            live.update(picture(status, console.width, console.height, notice), refresh=True)
            if quit_within(interval_s):
                return
            try:
                status, notice = client.status(), ""
            except EnvironmentUnusableError as error:
                notice = error.message  # another scheduler may come


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits for a key: it returns True if the user quits within so many seconds."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield lambda wait_s: select.select([], [], [], wait_s) != ([], [], [])
        return
    keyboard = sys.stdin.fileno()
    former = termios.tcgetattr(keyboard)

    def pressed(wait_s: float) -> bool:
        if not select.select([keyboard], [], [], wait_s)[0]:
            return False
        keys = os.read(keyboard, 64)
        return not keys or bool(_QUIT & set(keys))

    tty.setcbreak(keyboard)
    try:
        yield pressed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, former)
