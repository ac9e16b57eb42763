"""Ending a job, and signals that wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from gpuslice.errors import RamDiskFullError
from gpuslice.runtime.ending import end, say, undisturbed

from ...patience import PATIENCE_S


@pytest.fixture
def received() -> Iterator[list[int]]:
    received: list[int] = []

    def handler(signum: int, frame: FrameType | None) -> None:
        received.append(signum)

    before = signal.signal(signal.SIGUSR1, handler)
    yield received
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("kind", ["none", "full", "closed", "unread"])
def test_a_line_that_nobody_can_read_ends_nothing(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    receiving, sending = os.pipe()
    os.close(receiving)
    with open("/dev/full", "w") as full, os.fdopen(sending, "w", closefd=False) as unread:
        streams = {"none": None, "full": full, "closed": open(os.devnull), "unread": unread}  # noqa: SIM115
        assert streams["closed"] is not None
        streams["closed"].close()
        monkeypatch.setattr(sys, "stderr", streams[kind])
        say("a line")
        monkeypatch.undo()
        for descriptor in (full.fileno(), sending):  # what is left in the buffers can go now
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def test_a_handler_waits_for_the_block_to_end(received: list[int]) -> None:
    with undisturbed():
        signal.raise_signal(signal.SIGUSR1)
        assert received == []
    assert received == [signal.SIGUSR1]
    signal.raise_signal(signal.SIGUSR1)
    assert len(received) == 2


def test_blocks_nest(received: list[int]) -> None:
    with undisturbed():
        with undisturbed():
            signal.raise_signal(signal.SIGUSR1)
        assert received == []
    assert received == [signal.SIGUSR1]


def test_ctrl_c_is_raised_after_the_block() -> None:
    done = []

    def block() -> None:
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
            done.append("whole block")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["whole block"]


class Interrupted(Exception):
    """What a script's handler raises."""


@pytest.mark.parametrize("moment", [(True, False), (False, True)], ids=["install", "restore"])
def test_a_signal_amid_the_handlers_leaves_none_of_them_replaced(
    monkeypatch: pytest.MonkeyPatch, received: list[int], moment: tuple[bool, bool]
) -> None:
    """``signal.signal`` runs handlers that are due before it does anything."""

    def handler(signum: int, frame: FrameType | None) -> None:
        raise Interrupted

    former = {number: signal.signal(number, handler) for number in (signal.SIGALRM, signal.SIGUSR2)}
    real, once = signal.signal, []

    def disturbed(signum: int, new: object) -> object:
        theirs = [one for one in former if signal.getsignal(one) is handler]
        due = len(theirs) == 1 and (signum == theirs[0], new is handler) == moment
        if due and not once:
            once.append(signum)
            signal.raise_signal(theirs[0])
        return real(signum, new)  # type: ignore[arg-type]

    try:
        monkeypatch.setattr("signal.signal", disturbed)
        with pytest.raises(Interrupted), undisturbed():
            signal.raise_signal(signal.SIGUSR1)
        assert once
        assert [signal.getsignal(number) for number in former] == [handler, handler]
        signal.raise_signal(signal.SIGUSR1)
        assert received == [signal.SIGUSR1] * (1 + moment[1])
    finally:
        monkeypatch.undo()
        for number, before in former.items():
            real(number, before)


def test_end_says_what_and_the_remedy_in_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        end(RamDiskFullError("the RAM disk is full", "make room"))
    assert info.value.code == 5
    assert capsys.readouterr().err == "gpuslice: the RAM disk is full\ngpuslice: make room\n"


@pytest.mark.parametrize(
    ("call", "status"),
    [
        ("ending.end_parked(errors.DeviceMemoryError('no memory'))", 3),
        ("ending.leave_parked()", 0),
    ],
)
def test_a_parked_job_ends_without_its_own_code(call: str, status: int) -> None:
    code = (
        "import atexit\n"
        "from gpuslice import errors; from gpuslice.runtime import ending\n"
        "atexit.register(print, 'exit handler')\n"
        "print('printed before')\n"
        f"try:\n    {call}\n"
        "finally:\n    print('finally')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout) == (status, "printed before\n")


@pytest.mark.parametrize(
    ("ending", "well", "code"),
    [
        ("sys.exit(0)", True, 0),
        ("raise SystemExit", True, 0),
        ("sys.exit(3)", False, 3),
        ("raise SystemExit(1)", False, 1),
        ("raise SystemExit('no data')", False, 1),
        ("raise KeyError", False, 1),
        ("try: sys.exit(1)\nexcept SystemExit as error: assert error.code == 1", True, 0),
        ("try: sys.exit(0)\nfinally: raise SystemExit(4)", False, 4),
        ("thread = threading.Thread(target=sys.exit, args=(1,)); thread.start(); thread.join()", True, 0),
    ],
)
def test_a_good_end_is_told_from_a_bad_one(tmp_path: Path, ending: str, well: bool, code: int) -> None:
    lines = [
        "import atexit, sys, threading",
        "from gpuslice.runtime import ending",
        "ending.watch_exit()",
    ]
    lines += ["atexit.register(lambda: print(ending.ended_well()))", ending]
    (tmp_path / "script.py").write_text("\n".join(lines), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "script"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.stdout, done.returncode) == (f"{well}\n", code), done.stderr


INTERRUPTED = """
import os, signal, sys, time
import torch.multiprocessing
from gpuslice.runtime import ending

def train(rank, interrupted):
    ending.watch_exit()
    ending.at_end(lambda: print(ending.ended_well(), flush=True))
    if interrupted:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

if __name__ == "__main__":
    ending.watch_exit()
    torch.multiprocessing.start_processes(train, (sys.argv[1] == "interrupted",), start_method=sys.argv[2])
"""


@pytest.mark.parametrize(
    ("word", "well", "method"),
    [("interrupted", False, "spawn"), ("interrupted", False, "fork"), ("left_alone", True, "fork")],
)
def test_an_interrupted_process_that_torch_has_started_has_not_ended_well(
    tmp_path: Path, word: str, well: bool, method: str
) -> None:
    (tmp_path / "script.py").write_text(INTERRUPTED, encoding="utf-8")
    command = [sys.executable, "script.py", word, method]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.stdout, done.returncode) == (f"{well}\n", 0), done.stderr
