"""The command that this process executes, to be executed anew in its place."""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import NoReturn

from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.training.identity import in_notebook


class OwnCommand:
    """This process's interpreter, arguments, environment and directory, before the script changes them."""

    def __init__(self) -> None:
        self._environ = dict(os.environ)
        self._pid = os.getpid()
        try:
            self._directory = os.getcwd()
        except OSError:  # it was removed
            self._directory = ""

    def can_be_repeated(self, identity: RankIdentity) -> bool:
        """Return True if executing the command again does what it did at first.

        Other ranks would wait for this one. A notebook's cells and a script on standard input are gone.
        """
        main = sys.modules["__main__"]
        text = getattr(main, "__file__", None) is not None or sys.argv[:1] == ["-c"]
        own = self._pid == os.getpid() and multiprocessing.parent_process() is None
        return text and own and identity.world_size == 1 and not hasattr(sys, "ps1") and not in_notebook()

    def repeat(self) -> NoReturn:
        """Execute the command in this process's place, without a return."""
        for child in multiprocessing.active_children():
            child.kill()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        if self._directory:
            os.chdir(self._directory)
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], self._environ)
