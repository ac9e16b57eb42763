"""Another process of a benchmark: a module of ours that answers every line it is told by one of its own."""

from __future__ import annotations

import subprocess
import sys


class Child:
    """``python -m MODULE WORDS``, until `close`."""

    def __init__(self, module: str, *words: object) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, line: str) -> None:
        """Say a line without waiting for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def listen(self) -> str:
        """The next line that it says."""
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        assert answer, f"{self._module} has died"
        return answer

    def ask(self, line: str) -> str:
        """Say a line; the answer to it."""
        self.tell(line)
        return self.listen()

    def close(self) -> None:
        """End it."""
        self._process.communicate()
