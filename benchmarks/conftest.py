"""What all benchmarks share: results name the machine by what it is, not by its host name."""

from __future__ import annotations

import os
from typing import Any


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    machine_info.pop("node", None)
    machine_info["cores"] = len(os.sched_getaffinity(0))
    try:
        import torch
    except ImportError:
        return
    machine_info["torch"] = torch.__version__
    machine_info["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def pytest_benchmark_update_commit_info(config: Any, commit_info: dict[str, Any]) -> None:
    commit_info.pop("project", None)
