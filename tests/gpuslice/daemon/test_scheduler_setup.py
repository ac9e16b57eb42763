"""What ``up`` makes of its options."""

from __future__ import annotations

import pytest

from gpuslice.daemon.scheduler_setup import options

PACKS = {"pack": "true", "pack_slice_s": "2.0"}


@pytest.mark.parametrize(
    ("policy", "settings", "pack", "found"),
    [
        ("rr", [], False, {}),
        ("rr", [], True, PACKS),
        ("gandiva", [], False, PACKS),
        ("gandiva", ["packing=false"], False, {}),
        ("gandiva", ["mode=reactive"], False, {}),
        ("gandiva", ["packing=false"], True, PACKS),
    ],
)
def test_who_packs(policy: str, settings: list[str], pack: bool, found: dict[str, str]) -> None:
    made = options(policy, settings, None, pack=pack)
    assert {
        name: value for name, value in made.items() if name.startswith("pack_") or name == "pack"
    } == found
