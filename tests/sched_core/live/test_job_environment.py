"""What a job that is started is told: its memory limit, and the patience of watchdogs."""

from __future__ import annotations

from pathlib import Path

from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.live.job_environment import job_environ, mps_environ
from gpuslice.types import DeviceName

GPUS = [DeviceName("cuda", 0), DeviceName("cuda", 1)]
LIMITED = JobSpec(id="a", submit_s=0.0, device_memory_bytes=3 << 30)


def test_a_job_is_told_its_memory_limit() -> None:
    program = Program(("true",), "/")
    assert job_environ({}, {}, (), LIMITED, 1, program)["GPUSLICE_MEMORY"] == str(3 << 30)
    assert job_environ({}, {}, (), JobSpec(id="a", submit_s=0.0), 1, program)["GPUSLICE_MEMORY"] == ""


def test_a_watchdog_is_patient_with_a_parked_job_unless_its_owner_has_set_it() -> None:
    name, spec = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", JobSpec(id="a", submit_s=0.0)
    assert int(job_environ({}, {}, (), spec, 1, Program(("true",), "/"))[name]) >= 24 * 3600
    assert name not in job_environ({}, {}, (), spec, 1, Program(("true",), "/", {name: "60"}))


def test_an_mps_server_is_told_where_one_runs(tmp_path: Path) -> None:
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert mps_environ(LIMITED, GPUS, environ) == {}
    (tmp_path / "control").touch()
    assert mps_environ(LIMITED, GPUS, environ) == {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4096M,1=4096M"}
    assert mps_environ(JobSpec(id="a", submit_s=0.0), GPUS, environ) == {}
    assert mps_environ(LIMITED, [DeviceName("cpu", 0)], environ) == {}
