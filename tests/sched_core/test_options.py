"""Names and options from text."""

from __future__ import annotations

import pytest

from gpuslice.errors import ConfigError
from gpuslice.sched_core.options import nearest
from gpuslice.sched_core.placement.registry import make_placement
from gpuslice.sched_core.policies.registry import make_policy


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no policy 'girtins' \(did you mean 'gittins'\?\)"):
        make_policy("girtins")
    with pytest.raises(ConfigError, match="did you mean 'consolidated'"):
        make_placement("consolidate")
    with pytest.raises(ConfigError, match="did you mean 'quantum_s'"):
        make_policy("rr", {"quantum": "2"})


def test_nothing_near_lists_all() -> None:
    assert nearest("zzz", ["fifo", "rr"]) == "known: fifo, rr"
    assert nearest("zzz", []) == "it takes none"


@pytest.mark.parametrize(
    ("policy", "options"),
    [("rr", {"quantum_s": "soon"}), ("2das", {"thresholds": "1,x"}), ("2das", {"by_devices": "perhaps"})],
)
def test_values_that_do_not_convert_are_named(policy: str, options: dict[str, str]) -> None:
    (key, value), *_ = options.items()
    with pytest.raises(ConfigError, match=f"{key}={value} is not possible for policy {policy}"):
        make_policy(policy, options)
