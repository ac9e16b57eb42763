"""Errors of gpuslice that a script does not catch: the message and the exit code, no traceback of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ...patience import PATIENCE_S
from ..conftest import Workshop

#: What the launcher does for a script, without torch.
HOOKED = "from gpuslice.runtime import uncaught\nuncaught.install()\n"


def script(directory: Path, body: str, *, hooked: bool = True) -> subprocess.CompletedProcess[str]:
    (directory / "script.py").write_text((HOOKED if hooked else "") + body, encoding="utf-8")
    command = [sys.executable, "script.py"]
    return subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


#: Line 7 of the script calls us.
OURS = """import sys
from gpuslice import errors
from gpuslice.config import parse_size
import atexit; atexit.register(print, "exit handler")
{before}
def configure(): {call}
try: configure()
finally: print("finally")
"""


@pytest.mark.parametrize(
    ("call", "code", "message"),
    [
        ("parse_size('4Q')", 2, "'4Q' is not a size"),
        ("raise errors.SuspendRefusedError('no route')", 3, "no route"),
        ("raise errors.CorruptSnapshotError('torn')", 4, "torn"),
        ("raise errors.RamDiskFullError('full')", 5, "full"),
    ],
)
def test_the_message_the_line_and_the_exit_code(tmp_path: Path, call: str, code: int, message: str) -> None:
    done = script(tmp_path, OURS.format(before="", call=call))
    assert (done.returncode, done.stdout) == (code, "finally\nexit handler\n")
    what, *remedy = done.stderr.splitlines()
    assert what == f"gpuslice: {message} ({tmp_path}/script.py, line 8)"
    assert len(remedy) <= 1


def test_without_the_launcher_it_is_an_exception_like_any_other(tmp_path: Path) -> None:
    done = script(tmp_path, OURS.format(before="", call="parse_size('4Q')"), hooked=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith("ConfigError: '4Q' is not a size (write for instance 4G or 512MiB)\n")


def test_other_exceptions_look_as_ever(tmp_path: Path) -> None:
    body = "try: {}['key']\nexcept KeyError as error: raise ValueError('é') from error\n"
    plain, ours = script(tmp_path, "#\n#\n" + body, hooked=False), script(tmp_path, body)
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)


CHAINED = "\nsys.excepthook = lambda *error: (print('own hook', flush=True), sys.__excepthook__(*error))"


def test_a_hook_of_the_script_s_own_comes_first(tmp_path: Path) -> None:
    done = script(tmp_path, OURS.format(before=CHAINED, call="parse_size('4Q')"))
    assert (done.returncode, done.stdout) == (2, "finally\nown hook\nexit handler\n")
    assert "'4Q' is not a size" in done.stderr


def test_python_s_own_hook_seems_to_be_in_place(tmp_path: Path) -> None:
    done = script(tmp_path, "import sys; print(sys.excepthook is sys.__excepthook__)")
    assert done.stdout == "True\n"


ATTACHED = """
import torch, gpuslice
try:
    gpuslice.restore("nowhere", model=torch.nn.Linear(1, 1))
except gpuslice.errors.SnapshotError as error:
    print("caught", type(error).__name__)
job = gpuslice.attach(model=torch.nn.Linear(1, 1), augment=[len])
"""


@pytest.mark.slow
def test_a_script_under_the_launcher(quick_workshop: Workshop) -> None:
    path = quick_workshop.write("train.py", ATTACHED)
    done = quick_workshop.gpuslice_run(str(path))
    assert (done.returncode, done.stdout) == (2, "caught RefusedSnapshotError\n"), done.stderr
    what, remedy = done.stderr.splitlines()
    assert what.startswith("gpuslice: augment[0] is a builtin_function_or_method")
    assert what.endswith(f" ({path}, line 7)")
    assert remedy.startswith("gpuslice: attach tensors")
