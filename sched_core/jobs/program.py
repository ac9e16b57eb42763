"""The command of a job."""

from __future__ import annotations

import msgspec

from gpuslice.types import PathText, VariableName, Word


class Program(msgspec.Struct, frozen=True):
    """The command that starts a job's processes, with directory and environment. The core only passes it on.

    Attributes
    ----------
    argv
        The command and its arguments; no shell is involved.
    directory
        Working directory.
    environ
        All of its environment; the scheduler adds its socket and the job's name.
    """

    argv: tuple[Word, ...]
    directory: PathText
    environ: dict[VariableName, Word] = {}
