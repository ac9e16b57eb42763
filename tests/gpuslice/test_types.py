"""Device and job names as users write them."""

from __future__ import annotations

import pytest

from gpuslice.errors import UsageError
from gpuslice.types import DeviceName, job_id


@pytest.mark.parametrize(
    ("text", "kind", "index", "back"),
    [
        ("cpu", "cpu", None, "cpu"),
        ("cpu:1", "cpu", 1, "cpu:1"),
        ("cuda", "cuda", 0, "cuda:0"),
        ("cuda:3", "cuda", 3, "cuda:3"),
    ],
)
def test_device_names(text: str, kind: str, index: int | None, back: str) -> None:
    name = DeviceName.parse(text)
    assert (name.kind, name.index, str(name)) == (kind, index, back)


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "cuda:-1", "cuda:1000", "CPU", "cpu:1 ", "cuda:0,1"])
def test_what_is_not_a_device(text: str) -> None:
    with pytest.raises(UsageError, match="is not a device"):
        DeviceName.parse(text)


@pytest.mark.parametrize("text", ["", ".", "..", "a/b", "-a", "a" * 65, "a b", "ä"])
def test_what_is_not_a_job_name(text: str) -> None:
    with pytest.raises(UsageError, match="is not a job name"):
        job_id(text)


def test_job_names() -> None:
    assert job_id("char-lm.2") == "char-lm.2"
