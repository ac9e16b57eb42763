"""The variables that the scheduler adds to the environment of a job that it starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpuslice import config
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.types import DeviceName

#: The GPU memory that MPS counts besides what torch allocates: the context and its kernels.
_CONTEXT_BYTES = 1 << 30
_MIB = 1 << 20
#: The variable that torchrun reads in place of ``--nproc-per-node``.
_TORCHRUN_RANKS = "PET_NPROC_PER_NODE"
#: Settings of watchdogs that would end a parked job, used unless its owner has set them. NCCL's heartbeat
#: monitor ends a process whose watchdog thread stands in a call of CUDA (480 s), as it does while the driver
#: has the job off its GPUs.
_WATCHDOGS = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(7 * 24 * 3600)}


def job_environ(
    common: Mapping[str, str],
    tenant_ramdisk: Mapping[str, str],
    devices: Sequence[DeviceName],
    spec: JobSpec,
    ranks: int,
    program: Program,
) -> dict[str, str]:
    """Return the variables that a job gets over its own environment. They say who the job is.

    Its node adds the variables that say where the job reports.

    Parameters
    ----------
    common
        The variables that every job gets.
    ranks
        How many ranks its command is to start.
    tenant_ramdisk
        Limits by tenant, ``8G`` style.
    devices
        The scheduler's devices.
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
    if spec.relaunch:
        environ[_TORCHRUN_RANKS] = str(ranks)
    patience = {name: value for name, value in _WATCHDOGS.items() if name not in program.environ}
    return {**common, **patience, **environ, **mps_environ(spec, devices, program.environ)}


def mps_environ(spec: JobSpec, devices: Sequence[DeviceName], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the memory limit as an MPS server takes it, if the job has one and a server runs; else nothing.

    It stands behind torch's own limit, for memory that other code of the process allocates. So it is wider by
    a context.
    """
    pipes = Path(environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    gpus = [device.index or 0 for device in devices if device.kind == "cuda"]
    if not spec.device_memory_bytes or not gpus or not os.path.exists(pipes / "control"):
        return {}
    limit_mib = -(-(spec.device_memory_bytes + _CONTEXT_BYTES) // _MIB)
    return {
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": ",".join(f"{gpu}={limit_mib}M" for gpu in range(max(gpus) + 1))
    }
