"""The memory limit of a job on a simulated GPU: torch keeps it from the moment when CUDA begins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ..patience import PATIENCE_S

GOES_BEYOND = """
import torch
print(torch.cuda.is_initialized())
from torch.utils.data import DataLoader
kept = torch.ones(40 << 18, device="cuda:0")
for boundary, batch in enumerate(DataLoader(range(2))):
    try:
        torch.ones(80 << 18, device="cuda:0")
    except torch.OutOfMemoryError as error:
        print("refused", boundary, "limit of 100.00 MiB: it asked for 80.00 MiB" in str(error))
torch.ones(200 << 18, device="cuda:0")
"""


def test_what_goes_beyond_fails_by_name_also_after_a_suspend(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(GOES_BEYOND, encoding="utf-8")
    options = ["--device", "cuda:0", "--memory", "100MiB", "--suspend-every", "1"]
    command = [sys.executable, "-m", "gpuslice", "run", *options, "--ramdisk-dir", str(tmp_path / "r")]
    done = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (1, "False\nrefused 0 True\nrefused 1 True\n"), done.stderr
    said = "gpuslice: out of memory: the job's memory limit of 100.00 MiB: it asked for 200.00 MiB"
    assert done.stderr.count(said) == 1
