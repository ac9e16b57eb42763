"""When CUDA begins in a job that has a GPU: when its script begins it, on that GPU, and not before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, torch
from torch.utils.data import DataLoader
assert not torch.cuda.is_initialized(), "by the import"
child = os.fork()
if child == 0:
    os._exit(int(torch.ones(3, device="cuda").sum().item()))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
for _ in DataLoader(torch.arange(6.0)):
    pass
assert not torch.cuda.is_initialized(), "by a boundary"
state = torch.ones(4, device="cuda")
assert torch.cuda.current_device() == state.device.index == 0
for _ in DataLoader(torch.arange(6.0)):
    state += 1
print(state.tolist())
"""


def test_nothing_begins_before_the_script_does(tmp_path: Path, script_environ: dict[str, str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "gpuslice", "run", "--device", "cuda:0", "--suspend-every", "2"]
    command += ["--ramdisk-dir", str(tmp_path / "ramdisk"), "--report", "report.json", "train.py"]
    environ = {**os.environ, **script_environ}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[7.0, 7.0, 7.0, 7.0]\n"), done.stderr
