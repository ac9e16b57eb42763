"""Suspend and resume of an adopted process: every state it may be in, and what the driver refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from gpuslice.cli import main
from gpuslice.driver_route import adopted, switch
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


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gpuslice"


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


@pytest.mark.parametrize("moves", [{}, {A: B, B: A}], ids=["back", "to another GPU"])
def test_the_driver_is_not_asked_where_the_memory_is_not_free(
    monkeypatch: pytest.MonkeyPatch, moves: dict[UUID, UUID], cache: Path
) -> None:
    """One that it could not bring back once it would never bring back."""
    process, used_bytes = FakeProcess(), 51
    monkeypatch.setattr(adopted, "bytes_of_process", lambda pid: {f"GPU-{A}": 50})

    def driver() -> Driver:
        first, second = (replace(gpu, total_bytes=100) for gpu in gpus(A, B))
        full, empty = (second, first) if moves else (first, second)
        return Driver("580.1", "13.0", (replace(full, used_bytes=used_bytes), replace(empty, used_bytes=100)))

    monkeypatch.setattr(adopted, "read_driver", driver)
    adopted.suspend(process)
    with pytest.raises(DeviceMemoryError, match=r"has 49 bytes free, process 7 needs 50"):
        adopted.resume(process, moves)
    assert (process.state, process.moves) == (ProcessState.CHECKPOINTED, None)
    used_bytes = 50
    adopted.resume(process, moves)
    assert (process.state, process.moves) == (ProcessState.RUNNING, moves)
    assert list((cache / "adopted").iterdir()) == []


def test_what_is_remembered_is_of_that_process_and_goes_when_it_has_ended(cache: Path) -> None:
    process = FakeProcess()
    ended = cache / "adopted" / f"{2**22 + 1}.5"
    adopted.suspend(process)
    (known,) = (cache / "adopted").iterdir()
    ended.touch()
    known.rename(known.with_name("7.5"))  # of an earlier process with its number
    adopted.resume(process)
    adopted.suspend(process)
    assert not ended.exists()


def test_a_damaged_file_of_needs_is_named_and_nothing_is_asked(cache: Path) -> None:
    process = FakeProcess()
    adopted.suspend(process)
    (known,) = (cache / "adopted").iterdir()
    known.write_bytes(b"{")
    with pytest.raises(EnvironmentUnusableError, match="says what process 7 needs"):
        adopted.resume(process)
    assert (process.state, process.moves) == (ProcessState.CHECKPOINTED, None)


def test_a_suspend_that_cannot_write_down_the_needs_is_refused(cache: Path) -> None:
    process = FakeProcess()
    cache.mkdir(mode=0o700)
    (cache / "adopted").write_text("a file where the folder should be")
    with pytest.raises(EnvironmentUnusableError, match="cannot be written"):
        adopted.suspend(process)
    assert process.state is ProcessState.RUNNING


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
        switch.suspend_all([first, refused, last])
    assert {process.state for process in (first, refused, last)} == {ProcessState.RUNNING}
    assert switch.suspend_all([first, last]) == 2
    assert switch.resume_all([first, refused, last]) == 2


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
        (("0",), "0 is not a process id"),
        ((str(1 << 31),), f"{1 << 31} is not a process id"),
        (("1", "--suspend", "--resume"), "choose one"),
        (("1", "--to", "cuda:0=cuda:1"), "--to is given without --resume"),
        (("1", "--timeout", "5"), "--timeout needs --suspend"),
        (("1", "--suspend", "--timeout", "nan"), "--timeout needs --suspend"),
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
