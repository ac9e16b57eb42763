"""The heap from which a script's main thread allocates: what a suspend leaves of it, made good for gradients.

State that was made there, between small objects of Python and torch, leaves a hole for every storage or two.
It comes back elsewhere (``apart``), and gradients, which training makes anew in every step, would go into the
holes: in small pages, because each block of 2 MiB has a small object in it. So malloc is made to hand out the
holes, once, and nobody uses them: that takes addresses and no memory. Gradients then lie at the heap's end.
That is moved out again as far as they may need, behind huge pages; a suspend gives all of it back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import malloc
from .host import ask_for_huge_pages

#: Smaller holes are left: plugging one may take a page, and small pieces go into them all the same.
_MIN_HOLE_BYTES = 128 << 10
#: Larger ones are plugged by several pieces. Each size is about 0.84 of the one before.
_SIZES = [int(2 ** (quarter / 4)) for quarter in range(4 * 26, 4 * 17 - 1, -1)]
#: What the free end keeps at least: what glibc itself comes to once a program has freed a piece of 32 MiB.
_KEPT_BYTES = 64 << 20
#: A piece larger than nearly all holes, and how many are asked for at most until the end has moved. For a
#: state that is smaller than one nothing is done.
_PIECE_BYTES, _MOST_PIECES = 16 << 20, 8

#: Sizes of storages that have left holes here; ``None`` once the holes are plugged.
_left: set[int] | None = set()


def leave(storages: Sequence[torch.UntypedStorage]) -> None:
    """Note which of these, about to be given back, will leave holes."""
    if _left is None or not malloc.may_set():
        return
    heap = range(malloc.main_heap_start(), malloc.main_heap_end())
    _left.update(storage.nbytes() for storage in storages if storage.data_ptr() in heap)


def settle(nbytes: int) -> None:
    """Make it good for the gradients of a state of ``nbytes`` that is about to come back elsewhere.

    Called by the main thread; in another one it does nothing, because that has a heap of its own.
    """
    global _left
    malloc.tell(malloc.TRIM_THRESHOLD, min(_KEPT_BYTES + 2 * nbytes, malloc.MOST_BYTES))
    if nbytes < _PIECE_BYTES:
        return
    if _left and max(_left) >= _MIN_HOLE_BYTES:
        _plug(_left)
        _left = None
    _move_end(min(nbytes, malloc.MOST_BYTES))


def _plug(left: set[int]) -> None:
    """Take all holes and leave them so; first by the sizes of what was there, which fills them exactly."""
    holes = range(malloc.main_heap_start(), malloc.main_heap_end() - malloc.free_end_bytes())
    exact = sorted((nbytes for nbytes in left if nbytes >= _MIN_HOLE_BYTES), reverse=True)
    for nbytes in (*exact, *_SIZES):
        while (piece := malloc.take(nbytes)) in holes:
            pass
        malloc.give_back(piece)


def _move_end(nbytes: int) -> None:
    """Have ``nbytes`` free at its end, behind huge pages."""
    end = malloc.main_heap_end()
    used_end = end - malloc.free_end_bytes()
    pieces: list[int] = []
    with malloc.meanwhile(malloc.TOP_PAD, nbytes, malloc.USUAL_BYTES):
        while malloc.main_heap_end() == end and len(pieces) < _MOST_PIECES:
            pieces.append(malloc.take(_PIECE_BYTES))
        for piece in pieces:
            malloc.give_back(piece)
    ask_for_huge_pages(used_end, malloc.main_heap_end() - used_end)
