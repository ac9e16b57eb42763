"""What a copy was made of: sums over several copies."""

from __future__ import annotations

from gpuslice.kernels.transfer import Transfer


def test_transfers_add_up_and_reasons_are_told_once() -> None:
    one = Transfer({"direct": 5, "packed": 2}, copies=3, launches=1, fallbacks=("no CuPy",))
    other = Transfer({"host": 4, "direct": 1}, copies=1, fallbacks=("no CuPy", "not locked"))
    both = one + other
    assert both.paths == {"direct": 6, "packed": 2, "host": 4}
    assert (both.copies, both.launches) == (4, 1)
    assert both.fallbacks == ("no CuPy", "not locked")
    assert (both.unchanged_bytes, (both + Transfer({"unchanged": 7})).unchanged_bytes) == (0, 7)
    assert Transfer() + Transfer() == Transfer()
