"""Suspend and resume of an adopted process: every state it may be in, and what the driver refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from uuid import UUID

import pytest

from gpuslice.cli import main
from gpuslice.errors import (
    DeviceMemoryError,
    EnvironmentUnusableError,
    GpusliceError,
    RollbackError,
    SuspendedStateError,
    SuspendRefusedError,
    UsageError,
)
from gpuslice.kernels.driver import ProcessState
from gpuslice.kernels.nvml import Driver, Gpu
from gpuslice.launch import adopted, driver_route_run

A, B, C = (UUID(int=number) for number in (1, 2, 3))


class FakeProcess:
    """The driver's state machine, with errors on order."""

    def __init__(self, state: ProcessState = ProcessState.RUNNING, **errors: GpusliceError) -> None:
        self.pid = 7
        self.state = state
        self.moves: Mapping[UUID, UUID] | None = None
        self._errors = errors

    def _go(self, verb: str, to: ProcessState) -> None:
        if verb in self._errors:
            raise self._errors[verb]
        self.state = to

    def lock(self, timeout_ms: int = 0) -> None:
        assert timeout_ms > 0, "it would wait without end"
        self._go("lock", ProcessState.LOCKED)

    def checkpoint(self) -> None:
        self._go("checkpoint", ProcessState.CHECKPOINTED)

    def restore(self, moves: Mapping[UUID, UUID] | None = None) -> None:
        self.moves = moves
        self._go("restore", ProcessState.LOCKED)

    def unlock(self) -> None:
        self._go("unlock", ProcessState.RUNNING)


def test_there_and_back() -> None:
    process = FakeProcess()
    adopted.suspend(process)
    assert process.state is ProcessState.CHECKPOINTED
    with pytest.raises(SuspendedStateError, match="already"):
        adopted.suspend(process)
    adopted.resume(process)
    assert process.state is ProcessState.RUNNING
    with pytest.raises(SuspendedStateError, match="not suspended"):
        adopted.resume(process)


def test_a_suspend_that_was_cut_off_goes_on_or_is_undone() -> None:
    for act, end in ((adopted.suspend, ProcessState.CHECKPOINTED), (adopted.resume, ProcessState.RUNNING)):
        process = FakeProcess(ProcessState.LOCKED)
        act(process)
        assert process.state is end


def test_who_is_refused_goes_on() -> None:
    process = FakeProcess(checkpoint=SuspendRefusedError("shared memory"))
    with pytest.raises(SuspendRefusedError, match="shared memory"):
        adopted.suspend(process)
    assert process.state is ProcessState.RUNNING


def test_an_undo_that_fails_is_told() -> None:
    process = FakeProcess(checkpoint=SuspendRefusedError("one"), unlock=EnvironmentUnusableError("two"))
    with pytest.raises(RollbackError, match=r"one.*two"):
        adopted.suspend(process)


def test_without_room_it_stays_suspended() -> None:
    process = FakeProcess(ProcessState.CHECKPOINTED, restore=DeviceMemoryError("full"))
    with pytest.raises(DeviceMemoryError):
        adopted.resume(process)
    assert process.state is ProcessState.CHECKPOINTED


def test_one_that_is_only_locked_is_not_said_to_have_moved() -> None:
    process = FakeProcess(ProcessState.LOCKED)
    with pytest.raises(UsageError, match="only locked and cannot move"):
        adopted.resume(process, {A: B, B: A})
    assert process.state is ProcessState.LOCKED
    adopted.resume(process)
    assert process.state is ProcessState.RUNNING


@pytest.mark.parametrize("act", [adopted.suspend, adopted.resume])
def test_a_lost_process_is_named(act: object) -> None:
    with pytest.raises(EnvironmentUnusableError, match="lost process 7"):
        act(FakeProcess(ProcessState.FAILED))  # type: ignore[operator]


def test_of_several_all_are_suspended_or_none() -> None:
    refused = FakeProcess(checkpoint=SuspendRefusedError("shared memory"))
    first, last = FakeProcess(), FakeProcess()
    with pytest.raises(SuspendRefusedError):
        driver_route_run.suspend_all([first, refused, last])
    assert {process.state for process in (first, refused, last)} == {ProcessState.RUNNING}
    assert driver_route_run.suspend_all([first, last]) == 2
    assert driver_route_run.resume_all([first, refused, last]) == 2


def gpus(*uuids: UUID) -> tuple[Gpu, ...]:
    return tuple(Gpu(index, "GPU", f"GPU-{uuid}", "9.0", 1, 0) for index, uuid in enumerate(uuids))


def test_a_move_names_every_gpu_that_is_visible() -> None:
    driver = Driver("580.1", "13.0", gpus(A, B, C))
    assert adopted.moves_to([2], [0], driver, {}) == {A: C, B: B, C: A}
    with pytest.raises(UsageError, match="no cuda:2"):
        adopted.moves_to([2], [0], driver, {"CUDA_VISIBLE_DEVICES": "0,1"})
    with pytest.raises(UsageError, match="named twice: 1, 1"):
        adopted.moves_to([1], [1], driver, {})
    with pytest.raises(EnvironmentUnusableError, match="570 cannot move"):
        adopted.moves_to([1], [0], Driver("570.1", "12.8", gpus(A, B)), {})
    first, second = gpus(A, B)
    divided = replace(first, instances=(replace(first, uuid=f"MIG-{C}"),))
    with pytest.raises(EnvironmentUnusableError, match="cuda:0 is no whole GPU"):
        adopted.moves_to([1], [0], Driver("580.1", "13.0", (divided, second)), {})


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("0",), "0 is no process"),
        ((str(1 << 31),), f"{1 << 31} is no process"),
        (("1", "--suspend", "--resume"), "choose one"),
        (("1", "--to", "cuda:0=cuda:1"), "--to without --resume"),
        (("1", "--timeout", "5"), "is for --suspend"),
        (("1", "--suspend", "--timeout", "nan"), "is for --suspend"),
    ],
)
def test_mistakes(words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["adopt", *words])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_a_process_that_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with pytest.raises(SystemExit) as ended:
        main(["adopt", str(process.pid)])
    assert ended.value.code == 2
    assert f"there is no process {process.pid}" in capsys.readouterr().err


def test_without_a_driver(capsys: pytest.CaptureFixture[str]) -> None:
    if os.path.exists("/dev/nvidiactl") or os.environ.get("CUDASIM_LIBRARIES"):
        pytest.skip("there is a driver")
    with pytest.raises(SystemExit) as ended:
        main(["adopt", str(os.getppid()), "--suspend"])
    assert ended.value.code == 3
    assert "no NVIDIA driver" in capsys.readouterr().err
