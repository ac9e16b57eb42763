"""Device and job names as users write them."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import msgspec
import pytest

from gpuslice import verbs
from gpuslice.errors import UsageError
from gpuslice.types import MAX_TEXT, DeviceName, checked, job_id, shortened

SUBMIT = verbs.Submit(name="a", stem="a", argv=("true",), directory="/", environ={})


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


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("steps", 10**30, "steps has to be a whole number <= 9007199254740992"),
        ("device_memory_bytes", -1, "device_memory_bytes has to be a whole number >= 0"),
        ("devices", 0, "devices has to be a whole number >= 1"),
        ("weight", 0.0, "weight has to be a number >= 1e-06"),
        ("weight", -1.0, "weight has to be a number"),
        ("weight", nan, "weight has to be a number"),
        ("deadline_s", inf, "deadline_s has to be a number <= 1000000000"),
        ("expected_s", nan, "expected_s has to be a number"),
        ("name", "a/b", "name has to be up to 64 letters"),
        ("argv", ("a", "b\0"), r"argv\[1\] has to be UTF-8 text without the character NUL"),
        ("argv", ("\udcff",), r"argv\[0\] has to be UTF-8 text"),
        ("directory", "/\0", "directory has to be UTF-8 text without the character NUL"),
        ("directory", "/" * 4097, "directory has to be no longer than 4096"),
        ("environ", {"A=B": "c"}, "a name in environ has to be UTF-8 text without '='"),
        ("environ", {"A": "\0"}, "environ.* has to be UTF-8 text without the character NUL"),
        ("tenant", "a\0", "tenant has to be UTF-8 text without '=' and control characters"),
        ("on_boundary_timeout", "explode", "on_boundary_timeout cannot be 'explode'"),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_name(field: str, value: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        checked(msgspec.structs.replace(SUBMIT, **{field: value}))


def test_values_within_their_ranges_stay_what_they_are() -> None:
    request = msgspec.structs.replace(
        SUBMIT, steps=2**53, environ={"": "=\n", "Ä": ""}, deadline_s=700 * 3600.0
    )
    assert checked(request) == request


def test_a_text_can_be_made_fit_to_be_sent() -> None:
    assert shortened("caf\udce9") == "caf?"
    assert shortened("abcdef", 5) == "ab..."
    assert len(shortened("a" * (MAX_TEXT + 1))) == MAX_TEXT
