"""Which rank a process is, by what its launcher or its process group says."""

from __future__ import annotations

import pytest

from gpuslice.launch.rank_identity import RankIdentity


@pytest.mark.parametrize(
    ("rank", "world_size", "environ", "identity"),
    [
        (1, 2, {}, RankIdentity(1, 1, 2, 2)),
        (1, 2, {"LOCAL_RANK": "1", "NODE_RANK": "0"}, RankIdentity(1, 1, 2, 2)),
        (5, 8, {"LOCAL_RANK": "1", "NODE_RANK": "1"}, RankIdentity(5, 1, 8, 4)),
        (5, 8, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, RankIdentity(5, 1, 8, 4)),
        # What cannot be so is not believed.
        (0, 2, {"LOCAL_RANK": "1"}, RankIdentity(0, 0, 2, 2)),
        (1, 2, {"LOCAL_RANK": "x"}, RankIdentity(1, 1, 2, 2)),
    ],
)
def test_a_member_of_a_process_group(
    rank: int, world_size: int, environ: dict[str, str], identity: RankIdentity
) -> None:
    assert RankIdentity.in_group(rank, world_size, environ) == identity
