"""The GPU suite itself: deadlines that leave nothing behind, imports on a bare machine, its packages."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from ..patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "benchmarks" / "gpu_suite"
#: Starts a process in a session of its own, says its id, and ignores being asked to end.
STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""
RUN_ONE = f"""
import json, steps, sys
from pathlib import Path
steps.GRACE_S = 0.1
runner = steps.Runner(Path(sys.argv[1]), Path(sys.argv[1]), float(sys.argv[2]))
step = runner.run("stubborn", ["-c", {STUBBORN!r}], output="pid", limit_s=float(sys.argv[3]))
print(json.dumps([step.exit_code, step.failed]))
"""
#: What `pip install -e` put in its place is not there on a bare machine.
BARE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in getattr(finder, "__name__", "")]
"""


def in_suite(code: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(SUITE)} | environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_nothing_is_left_of_a_step_that_ran_out_of_time(tmp_path: Path) -> None:
    done = in_suite(RUN_ONE, str(tmp_path), "100", "3")
    assert done.stdout.splitlines()[-1] == "[null, true]", done.stderr
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_no_step_begins_when_the_time_of_all_is_over(tmp_path: Path) -> None:
    done = in_suite(RUN_ONE, str(tmp_path), "0", "3")
    assert done.stdout.splitlines()[-1] == "[null, true]", done.stderr
    assert not (tmp_path / "pid").exists()


def test_a_bare_machine_imports_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BARE)
    code = f"""
import steps, subprocess, sys
from pathlib import Path
tree = steps.link_tree(Path({str(tmp_path)!r}) / "tree")
path = {{"PYTHONPATH": f"{{tree}}:{tmp_path}"}}
code = "import benchmarks.states, gpuslice.kernels, gpuslice.sched_core; print(gpuslice.kernels.__file__)"
subprocess.run([sys.executable, "-c", code], cwd=tree, env=path, check=True)
"""
    done = in_suite(code)
    assert done.stdout.strip() == str(tmp_path / "tree" / "gpuslice" / "kernels" / "__init__.py"), done.stderr


def test_results_of_two_runs_are_never_mixed(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    code = "import run, sys; from pathlib import Path; run.output_directory(Path(sys.argv[1]))"
    done = in_suite(code, str(tmp_path))
    assert (done.returncode, "is not empty" in done.stderr) == (1, True)


def test_the_wheels_are_all_that_is_needed() -> None:
    """Of pyproject.toml all but what is taken from the machine, and what the tests import."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {*project["dependencies"], *project["optional-dependencies"]["dev"]}
    lines = (SUITE / "wheels.txt").read_text().splitlines()
    wheels = {line for line in lines if not line.startswith("#")}
    assert wheels <= wanted
    names = {line.partition(">=")[0] for line in wheels}
    needed = {line.partition(">=")[0] for line in project["dependencies"]} - {"torch", "numpy"}
    assert names == needed | {"pytest", "pytest-benchmark", "hypothesis", "safetensors"}
