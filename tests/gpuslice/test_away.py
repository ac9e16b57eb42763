"""While a job's state is away, nothing hands control back to its script, whatever fails (away.py).

``GPUSLICE_AWAY=each`` fails each call with each kind of error: ``./x soak away``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuslice.checkpoint.format.reader import open_snapshot
from gpuslice.errors import DeviceMemoryError, SwitchFailedError
from gpuslice.runtime.ending import as_ours, whole_or_ended

from .away import ERRORS

SCRIPT = Path(__file__).with_name("away.py")
#: All but "cuda".
OTHER_KINDS = "memory,interrupt,torch-memory,host-memory,exit"
#: Exit codes of errors of ours; 99 stands for a script that ended by an exception it did not catch.
OURS = {3, 4, 5}


@pytest.mark.slow
def test_every_call_of_the_device_fails_once(tmp_path: Path) -> None:
    # What differs by the controller does not differ by the kind: a kind a call, in turn.
    order = os.environ.get("GPUSLICE_AWAY", "in turn")
    command = [sys.executable, str(SCRIPT), str(tmp_path), "drill,agent,script", f"cuda,{OTHER_KINDS}", order]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    whole = outcomes[0]["saved"]
    assert whole
    ended = [outcome for outcome in outcomes if not outcome["saved"]]
    for outcome in outcomes:
        assert outcome["saved"] in ("", whole), outcome  # never anything else than its own state
    for outcome in ended:
        assert outcome["code"] in OURS, outcome
        assert not outcome["error"], outcome  # none of its code has run
        (path,) = outcome["files"]
        open_snapshot(Path(path)).close()
    # Each of them was met: what changes nothing, what is undone, and what cannot be.
    assert ended
    assert len(ended) < len(outcomes) / 2


def test_no_kind_of_error_is_left_out() -> None:
    assert set(f"cuda,{OTHER_KINDS}".split(",")) == ERRORS.keys()


def test_what_fails_while_the_state_is_there_goes_on_to_the_script() -> None:
    with pytest.raises(KeyboardInterrupt), whole_or_ended(lambda: True):
        raise KeyboardInterrupt


def test_errors_of_others_are_named_in_one_line_and_ours_stay_what_they_are() -> None:
    ours = as_ours(RuntimeError("CUDA error: misaligned address\nFor debugging ..."), "the resume")
    assert isinstance(ours, SwitchFailedError)
    text = "the resume failed: RuntimeError: CUDA error: misaligned address For debugging ..."
    assert ours.message == text
    error = DeviceMemoryError("no memory")
    assert as_ours(error, "the resume") is error
