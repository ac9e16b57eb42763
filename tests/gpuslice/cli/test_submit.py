"""What ``gpuslice submit`` makes of its words."""

from __future__ import annotations

import pytest

from gpuslice.cli.submit import parse_counts
from gpuslice.errors import UsageError
from gpuslice.launch.rank_start import as_ranks


@pytest.mark.parametrize(
    ("text", "counts"), [("1", (1, 0)), ("8", (8, 0)), ("1:4", (1, 4)), ("2:2", (2, 2)), ("0", (0, 0))]
)
def test_numbers_of_devices(text: str, counts: tuple[int, int]) -> None:
    assert parse_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "1:", ":2", "4:1", "1:2:3", "-1", "1.5", "²", "9" * 12])
def test_what_is_no_number_of_devices_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--devices"):
        parse_counts(text)


def test_a_script_that_grows_is_started_as_many_ranks() -> None:
    started = as_ranks(["-m", "train", "--lr", "1"], 4)
    assert started[:2] == ["-m", "torch.distributed.run"]
    assert started[-6:] == ["--nproc-per-node", "4", "--module", "train", "--lr", "1"]
    own = ["--", "torchrun", "--nproc-per-node", "4", "train.py"]
    assert as_ranks(own, 4) == own
