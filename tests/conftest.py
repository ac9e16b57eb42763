"""What all tests need: signals that work, and the fake NVIDIA libraries, built once per test session."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import pytest

from gpuslice.checkpoint.discover.heap import hide_imports

from .fakes.build import FAKES, build

# Workers of pytest-xdist begin as the Pythons do that tests start, but their tests compile models.
sys.meta_path[:] = [finder for finder in sys.meta_path if finder.__module__ != "sitecustomize"]

# Torch's threads sleep when they have nothing to do; spinning, they take the cores from those that have.
# It is read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

#: First in the module path of every Python that a test starts, if that need not be like a user's.
QUICK = str(Path(__file__).with_name("quick"))
if "CUDASIM_LIBRARIES" not in os.environ:  # whose own account is made as a process ends
    _paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([QUICK, *(path for path in _paths if path not in ("", QUICK))])

# What a shell starts in the background ignores these, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# No test asserts a time, and Hypothesis shall not either. The environment of `./x test-cuda` has none.
if find_spec("hypothesis"):
    hypothesis = import_module("hypothesis")
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")

# For schedulers of fixtures that several tests share; a test has a directory of its own (below).
_locks = tempfile.TemporaryDirectory(prefix="gpuslice-locks-")
os.environ["GPUSLICE_LOCK_DIR"] = _locks.name

_PID = os.getpid()


def _end(number: int, frame: FrameType | None) -> None:
    """End as on Ctrl-C: fixtures clear away what they have started. What a test has forked just dies."""
    signal.signal(number, signal.SIG_DFL)
    if os.getpid() != _PID:
        os.kill(os.getpid(), number)
    where = (f"{Path(each.filename).name}:{each.lineno}" for each in traceback.extract_stack(frame, 8))
    raise KeyboardInterrupt(f"ended in {' > '.join(where)}")


signal.signal(signal.SIGTERM, _end)


def pytest_collection_finish() -> None:
    """From here on garbage is collected as ever, however this process was started."""
    gc.set_threshold(700, 10, 10)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: side by side with others, one that begins last ends last."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope="module", autouse=True)
def imports_hidden() -> None:
    """As under the launcher, no suspend looks at what was imported, nor at what other modules' tests left.

    That would be half of the time of the tests that suspend in this process.
    """
    gc.collect()
    hide_imports()


@pytest.fixture(scope="session")
def cuda_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a fake driver, a fake runtime, and a library that is linked to the runtime."""
    directory = tmp_path_factory.mktemp("cuda")
    driver = build(directory, "libcuda.c", "libcuda.so.1")
    script = f"-Wl,--version-script={FAKES / 'libcudart.map'}"
    runtime = build(directory, "libcudart.c", "libcudart.so.13", script, str(driver))
    build(directory, "libconsumer.c", "libconsumer.so", str(runtime), "-Wl,-z,now")
    return directory


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a fake NVML."""
    directory = tmp_path_factory.mktemp("nvml")
    build(directory, "libnvidia-ml.c", "libnvidia-ml.so.1")
    return directory


@pytest.fixture(scope="session")
def shim_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the vmm route's shim is compiled once for all tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_lock_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A lock directory of the test's own: those of other tests have theirs."""
    with tempfile.TemporaryDirectory(prefix="gpuslice-locks-") as path:
        monkeypatch.setenv("GPUSLICE_LOCK_DIR", path)
        yield


@pytest.fixture
def shm() -> Iterator[Path]:
    """A fresh directory on tmpfs (or wherever temporary files go, without one)."""
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="gpuslice-test-", dir=root))
    yield path
    shutil.rmtree(path)
