"""What the scheduler adds to the environment of a job that it starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpuslice import config
from gpuslice.sched_core.job import JobSpec
from gpuslice.types import DeviceName

#: What of a GPU's memory MPS counts besides what torch allocates: the context and its kernels.
_CONTEXT_BYTES = 1 << 30
_MIB = 1 << 20
#: What torchrun reads in place of ``--nproc-per-node``.
_TORCHRUN_RANKS = "PET_NPROC_PER_NODE"


def job_environ(spec: JobSpec, ranks: int, tenant_ramdisk: Mapping[str, str]) -> dict[str, str]:
    """The settings of one job: who it is; where it reports its node adds.

    Parameters
    ----------
    ranks
        How many its command is to start.
    tenant_ramdisk
        Limits by tenant, ``8G`` style.
    """
    own = {
        "job": spec.id,
        "ranks": str(ranks),
        "elastic": str(spec.joined),
        "tenant": spec.tenant,
        "tenant_ramdisk": tenant_ramdisk.get(spec.tenant, ""),
        "memory": str(spec.device_memory_bytes or ""),
    }
    environ = {config.variable(name): value for name, value in own.items()}
    return environ | {_TORCHRUN_RANKS: str(ranks)} if spec.relaunch else environ


def mps_environ(spec: JobSpec, devices: Sequence[DeviceName], environ: Mapping[str, str]) -> dict[str, str]:
    """The memory limit as an MPS server takes it, if the job has one and a server runs.

    Behind torch's own limit, for what else allocates in the process; so it is wider by a context.
    """
    pipes = Path(environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    gpus = [device.index or 0 for device in devices if device.kind == "cuda"]
    if not spec.device_memory_bytes or not gpus or not os.path.exists(pipes / "control"):
        return {}
    limit_mib = -(-(spec.device_memory_bytes + _CONTEXT_BYTES) // _MIB)
    return {
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": ",".join(f"{gpu}={limit_mib}M" for gpu in range(max(gpus) + 1))
    }
