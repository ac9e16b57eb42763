"""Names of jobs with fields for the options of their command."""

from __future__ import annotations

import pytest

from gpuslice.errors import UsageError
from gpuslice.launch.job_names import differing_options, expand, options


@pytest.mark.parametrize(
    ("name", "words", "expanded"),
    [
        ("k", [], "k"),
        ("k-{fold}", ["fold.py", "--fold", "0"], "k-0"),
        ("k-{fold}", ["fold.py", "--fold=0"], "k-0"),
        ("k-{fold}", ["fold.py", "--fold", "0", "--fold=3"], "k-3"),
        ("k-{f}", ["fold.py", "-f", "2"], "k-2"),
        ("{lr}-{batch_size}", ["--", "torchrun", "t.py", "--batch-size", "8", "--lr", "-0.1"], "-0.1-8"),
        ("k-{batch-size}", ["t.py", "--batch_size", "8"], "k-8"),
        ("k-{fold}-{model.width}", ["hydra.py", "fold=1", "+model.width=32"], "k-1-32"),
        ("k-{data}", ["t.py", "--data", "/data/set 1"], "k--data-set-1"),
    ],
)
def test_fields_have_the_options_values(name: str, words: list[str], expanded: str) -> None:
    assert expand(name, words) == expanded


def test_an_unknown_field_is_an_error_that_names_those_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"no --seed") as error:
        expand("k-{seed}", ["t.py", "--fold", "0", "--amp", "--lr=3"])
    assert error.value.remedy == "it has {fold}, {lr}"
    with pytest.raises(UsageError) as error:
        expand("k-{seed}", ["t.py", "--amp"])
    assert error.value.remedy == "it has no options with a value"


def test_options_that_differ() -> None:
    assert options(["--fold", "1", "--amp", "--lr=3"]) == {"fold": "1", "lr": "3"}
    assert differing_options(["--fold", "1", "--lr", "3"], ["--lr=3", "--fold=2"]) == ["fold"]
    assert differing_options(["a"], ["b"]) == differing_options([], []) == []
