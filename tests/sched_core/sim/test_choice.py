"""Where compiled simulators are kept, which says whether a short simulation is worth compiling."""

from __future__ import annotations

import os
import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from gpuslice.sched_core.sim.compiled import choice
from gpuslice.sched_core.sim.compiled.rules import form_of
from gpuslice.sched_core.sim.run import Request
from gpuslice.sched_core.traces.formats import read_trace

DATA = Path(__file__).resolve().parents[2] / "data"


def kept_in(folder: Path) -> Path:
    """Where the package at ``folder`` keeps what it compiles."""
    spec = spec_from_file_location("gpuslice.sched_core.sim.compiled.another_choice", folder / "choice.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.kept_in()
    assert isinstance(found, Path)
    return found


def test_each_version_has_a_place_of_its_own_wherever_it_is_installed(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        shutil.copytree(Path(choice.__file__).parent, folder)
    before = kept_in(one)
    assert kept_in(other) != before
    os.utime(one / "loop.py", ns=(1, 1))  # the same contents, installed again: numba uses what there is
    assert kept_in(one) == before
    (one / "arrays.py").write_text("", encoding="utf-8")  # at this one it does not look
    assert kept_in(one) != before


def test_a_short_simulation_is_compiled_only_if_that_is_not_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "kept_in", lambda: tmp_path)
    trace = read_trace(DATA / "traces" / "philly_ee9e8c_480.csv")
    simulation = Request(trace, "16x4", "rr", {}).prepare()
    form = form_of(simulation)
    assert form is not None
    assert choice.worth_compiling(simulation) is None
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled" / "loop.advance-1.py311.nbi").touch()
    assert choice.is_kept(form)
    assert choice.worth_compiling(simulation) == form
