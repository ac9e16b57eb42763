"""The last lines of a job's output, which is read a part at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuslice.client import log_tail
from gpuslice.client.log_tail import start_of_last_lines


@given(
    st.lists(st.sampled_from([b"\n", b"a", b"bc\n", b"\r"]), max_size=40).map(b"".join),
    st.integers(0, 8),
    st.integers(1, 9),
)
def test_they_are_those_that_tail_prints(text: bytes, lines: int, at_once: int) -> None:
    before, log_tail._BLOCK_BYTES = log_tail._BLOCK_BYTES, 7
    try:
        found = start_of_last_lines(lambda offset: text[offset : offset + at_once], len(text), lines)
    finally:
        log_tail._BLOCK_BYTES = before
    whole = text.split(b"\n")
    kept = [line + b"\n" for line in whole[:-1]] + ([whole[-1]] if whole[-1] else [])
    assert text[found:] == b"".join(kept[len(kept) - min(lines, len(kept)) :])


def test_output_that_has_become_shorter_is_read_to_its_end() -> None:
    assert start_of_last_lines(lambda offset: b"a\nb\n"[offset:], 1000, 2) == 0
