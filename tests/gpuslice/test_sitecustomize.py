"""Which processes get the hooks, and how the user's own sitecustomize and imports fare."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import pytest

from gpuslice.launch.command import ARMED, LAUNCH, SITEDIR

from ..patience import PATIENCE_S

PYTHON = "/usr/bin/python"
RUN = {LAUNCH: "17"}


@pytest.fixture(scope="module")
def ours() -> ModuleType:
    """The module under another name, so that loading it does nothing."""
    spec = importlib.util.spec_from_file_location("gpuslice_sitecustomize", SITEDIR / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("environ", "argv", "trains"),
    [
        ({}, [PYTHON, "train.py"], False),
        (RUN, [PYTHON, "train.py"], True),
        (RUN, [PYTHON, "-u", "train.py", "torchrun"], True),
        (RUN, [PYTHON, "-m", "package.train"], True),
        (RUN, [PYTHON, "/usr/bin/torchrun", "train.py"], False),
        (RUN, [PYTHON, "-m", "torch.distributed.run", "train.py"], False),
        (RUN, [PYTHON, "-m", "accelerate.commands.launch", "train.py"], False),
        (RUN | {"RANK": "0"}, [PYTHON, "-u", "train.py"], True),
        (RUN | {"RANK": "1", ARMED: "0"}, [PYTHON, "train.py"], True),
        # The same process, which has executed itself.
        (RUN | {ARMED: f" {os.getpid()}"}, [PYTHON, "train.py"], True),
        # Below a process that has the hooks.
        (RUN | {ARMED: ""}, [PYTHON, "evaluate.py"], False),
        (RUN | {"RANK": "0", ARMED: "0"}, [PYTHON, "evaluate.py"], False),
        # Below a rank that learned its number from its process group alone.
        (RUN | {ARMED: "1 7"}, [PYTHON, "evaluate.py"], False),
        # A script that starts torchrun itself.
        (RUN | {"RANK": "0", ARMED: ""}, [PYTHON, "train.py"], True),
        (
            RUN,
            [PYTHON, "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork"],
            False,
        ),
        (RUN, [PYTHON, "-c", "from multiprocessing.resource_tracker import main;main(9)"], False),
        (RUN, [PYTHON, "/x/torch/_inductor/compile_worker/__main__.py", "--pickler=x"], False),
        (RUN, [PYTHON, "/x/torch/_inductor/__autotune_main__.py", "--parent=1"], False),
        (RUN, [PYTHON, "-OBuX", "dev", "-Wignore", "-m", "torch.distributed.run", "train.py"], False),
        (RUN, [PYTHON, "--check-hash-based-pycs", "never", "/usr/bin/torchrun", "train.py"], False),
        (RUN, [PYTHON, "-um", "torch.distributed.run", "train.py"], False),
        # Names and arguments of the user's own that look like those of helpers and launchers.
        (RUN, [PYTHON, "train_multiprocessing.py"], True),
        (RUN, [PYTHON, "/home/u/compile_worker_bench/train.py"], True),
        (RUN, [PYTHON, "train.py", "--ctx", "torch.multiprocessing.spawn"], True),
        (RUN, [PYTHON, "train.py", "-m", "deepspeed"], True),
        (RUN, [PYTHON, "-W", "torchrun", "-X", "torchrun", "train.py"], True),
        (RUN, [PYTHON, "-c", "import train", "-m", "torchrun"], True),
        (RUN, [PYTHON, "-", "--multiprocessing-fork"], True),
        (RUN, [PYTHON], True),
        (RUN, [PYTHON, "-m"], True),
    ],
)
def test_who_trains(ours: ModuleType, environ: dict[str, str], argv: list[str], trains: bool) -> None:
    assert ours.trains(environ, argv) is trains


@pytest.mark.parametrize(
    ("environ", "argv", "may"),
    [
        ({}, [PYTHON, "train.py"], False),
        (RUN | {ARMED: " 1"}, [PYTHON, "train.py"], True),
        (
            RUN | {ARMED: " 1"},
            [PYTHON, "-c", "from multiprocessing.spawn import x", "--multiprocessing-fork"],
            True,
        ),
        (RUN, [PYTHON, "-c", "from multiprocessing.resource_tracker import main;main(9)"], False),
        (RUN, [PYTHON, "/x/torch/_inductor/compile_worker/__main__.py", "--pickler=x"], False),
        (RUN, [PYTHON, "/usr/bin/torchrun", "train.py"], False),
        (RUN, [PYTHON, "-c", "from multiprocessing.forkserver import main; main(3, 4)"], True),
        (RUN | {ARMED: " 1"}, [PYTHON, "train.py", "multiprocessing.resource_tracker"], True),
        (RUN | {ARMED: " 1"}, [PYTHON, "/home/u/compile_worker/train.py"], True),
    ],
)
def test_who_may_become_a_rank(ours: ModuleType, environ: dict[str, str], argv: list[str], may: bool) -> None:
    assert ours.may_join(environ, argv) is may


def python(code: str, *path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run code with our directory first on PYTHONPATH, then ``path``."""
    variables = {"PYTHONPATH": ":".join(str(entry) for entry in (SITEDIR, *path))} | environ
    return subprocess.run(
        [sys.executable, "-c", code],
        env=variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_the_users_own_sitecustomize_runs_and_ours_is_gone(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("mark = __file__")
    code = f"import sys, sitecustomize; print(sitecustomize.mark, {str(SITEDIR)!r} in sys.path)"
    done = python(code, own)
    assert (done.stdout, done.stderr) == (f"{own}/sitecustomize.py False\n", "")


def test_without_one_there_is_none() -> None:
    done = python("import sitecustomize")
    assert "ModuleNotFoundError: No module named 'sitecustomize'" in done.stderr


def test_an_error_in_the_users_own_is_reported_as_ever(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("1 / 0")
    done = python("print('runs')", tmp_path)
    assert done.stdout == "runs\n"
    assert "ZeroDivisionError: division by zero" in done.stderr


#: A user's sitecustomize that puts a gpuslice in place whose hooks do what the test wants.
FAKE_GPUSLICE = """
import sys, types
hooks = types.ModuleType("gpuslice.hooks.installation")
def install(early):
    {body}
hooks.install = install
sys.modules["gpuslice"] = package = types.ModuleType("gpuslice")
sys.modules["gpuslice.hooks.installation"] = package.installation = hooks
"""


def fake(directory: Path, body: str) -> Path:
    """A torch that is quick to import, and hooks whose ``install`` has this body."""
    (directory / "torch.py").write_text("ready = True\n")
    (directory / "sitecustomize.py").write_text(FAKE_GPUSLICE.format(body=body))
    return directory


def test_hooks_are_installed_once_after_torch_though_it_was_looked_up_before(tmp_path: Path) -> None:
    fakes = fake(tmp_path, "import torch; print('hooks', torch.ready, type(torch.__loader__).__name__)")
    code = (
        "import importlib.util, sys\n"
        "print(importlib.util.find_spec('torch').name, 'torch' in sys.modules)\n"
        "import torch, torch\n"
        "print(importlib.util.find_spec('torch').loader is torch.__loader__)\n"
    )
    done = python(code, fakes, GPUSLICE_LAUNCH="17")
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["torch False", "hooks True SourceFileLoader", "True"]


def test_without_the_launcher_nothing_happens(tmp_path: Path) -> None:
    assert python("import torch", fake(tmp_path, "print('hooks')")).stdout == ""


def test_a_bug_of_ours_does_not_break_the_import(tmp_path: Path) -> None:
    fakes = fake(tmp_path, "raise AttributeError('a bug')")
    done = python("import torch; print('trains')", fakes, GPUSLICE_LAUNCH="17")
    assert (done.returncode, done.stdout) == (0, "trains\n")
    assert done.stderr == "gpuslice: no hooks in this process: AttributeError: a bug\n"


def test_with_a_suspend_asked_for_it_ends_the_job(tmp_path: Path) -> None:
    fakes = fake(tmp_path, "raise AttributeError('a bug')")
    code = "import torch; print('trains')"
    done = python(code, fakes, GPUSLICE_LAUNCH="17", GPUSLICE_SUSPEND_EVERY="2")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "gpuslice: no hooks in this process: AttributeError: a bug\n"


def test_what_an_environment_lacks_is_found_by_its_path(tmp_path: Path) -> None:
    package, module = tmp_path / "there" / "lacking", tmp_path / "there" / "alone.py"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "part.py").write_text("found = 'part'")
    module.write_text("found = 'alone'")
    places = f"{EXTENSION_SUFFIXES[0]}:lacking={package}:alone={module}"
    code = "import alone, lacking.part; print(alone.found, lacking.part.found)"
    assert python(code, GPUSLICE_PACKAGES=places).stdout == "alone part\n"


def test_an_interpreter_without_gpuslice_is_told_where_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['gpuslice'] = None")
    places = f".cpython-39-x86_64-linux-gnu.so:gpuslice={tmp_path}"
    done = python(
        "import torch", tmp_path, GPUSLICE_LAUNCH="17", GPUSLICE_SOCKET="x", GPUSLICE_PACKAGES=places
    )
    assert done.returncode == 3
    assert f"install it there: {sys.executable} -m pip install gpuslice (it has Python 3." in done.stderr


def test_a_torch_that_is_too_old_is_named(ours: ModuleType) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    oldest = ".".join(map(str, ours.OLDEST_TORCH))
    assert f"torch>={oldest}" in project["project"]["dependencies"]
    for version in (oldest, "2.13.0+cpu", "2.14.0a0", "unknown", ""):
        ours.check_torch(version)
    with pytest.raises(ImportError, match=r"torch 2\.5\.1 is older than"):
        ours.check_torch("2.5.1")


FAILING_TORCH = "def load():\n    raise OSError('libtorch.so: cannot open shared object file')\nload()\n"


@pytest.mark.parametrize("environ", [{}, {"GPUSLICE_LAUNCH": "17"}], ids=["plain", "ours"])
def test_what_a_torch_that_fails_says_is_all_its_own(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "torch.py").write_text(FAILING_TORCH)
    done = python("import torch", tmp_path, **environ)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "Traceback (most recent call last):",
        '  File "<string>", line 1, in <module>',
        f'  File "{tmp_path}/torch.py", line 3, in <module>',
        "    load()",
        f'  File "{tmp_path}/torch.py", line 2, in load',
        "    raise OSError('libtorch.so: cannot open shared object file')",
        "OSError: libtorch.so: cannot open shared object file",
    ]


def test_a_torch_that_fails_at_first_gets_the_hooks_later(tmp_path: Path) -> None:
    fakes = fake(tmp_path, "print('hooks')")
    (fakes / "torch.py").write_text("import os\nready = os.environ.pop('FIRST', None)\nassert not ready\n")
    code = "try: import torch\nexcept AssertionError: print('failed')\nimport torch, torch\n"
    code += "print(type(torch.__spec__).__name__, torch.__spec__._initializing)"
    done = python(code, fakes, GPUSLICE_LAUNCH="17", FIRST="1")
    assert (done.stdout.split(), done.stderr) == (["failed", "hooks", "ModuleSpec", "False"], "")


LOADED = "True SourceFileLoader ModuleSpec"
LAZILY = """
import importlib.util, sys
spec = importlib.util.find_spec("torch")
spec.loader = importlib.util.LazyLoader(spec.loader)
torch = sys.modules["torch"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(torch)
print(type(torch).__name__)
print(torch.ready, type(torch.__loader__).__name__, type(torch.__spec__).__name__)
"""


def test_a_torch_that_is_loaded_lazily_gets_the_hooks(tmp_path: Path) -> None:
    done = python(LAZILY, fake(tmp_path, "print('hooks')"), GPUSLICE_LAUNCH="17")
    assert (done.stdout.splitlines(), done.stderr) == (["_LazyModule", "hooks", LOADED], "")
