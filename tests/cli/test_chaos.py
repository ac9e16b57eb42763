"""Random mischief of every kind; every job is accounted for, and every model is right.

``GPUSLICE_CHAOS_S`` says how many seconds at least, ``GPUSLICE_CHAOS_SEED`` what happens. Everything happens
once at least, however short that is; ``./x soak chaos`` goes on for minutes.
"""

from __future__ import annotations

import os

import pytest

from .chaos import STEPS, Chaos
from .conftest import Shell
from .test_training import undisturbed


@pytest.mark.slow
def test_every_job_is_accounted_for_after_random_mischief(shell: Shell) -> None:
    duration_s = float(os.environ.get("GPUSLICE_CHAOS_S", "0"))
    chaos = Chaos(shell, int(os.environ.get("GPUSLICE_CHAOS_SEED", "1")))
    chaos.run(duration_s)
    print(f"{len(chaos.fates)} jobs;", dict(chaos.done))
    assert chaos.digests <= {undisturbed(STEPS)}
