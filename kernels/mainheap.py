"""The heap from which a script's main thread allocates: what a suspend leaves of it, made good for gradients.

State that was made there, between small objects of Python and torch, leaves a hole for every storage or two.
It comes back elsewhere (``apart``), and gradients, which training makes anew in every step, would go into the
holes: in small pages, because each block of 2 MiB has a small object in it. So malloc is made to hand out the
holes, once, and nobody uses them: that takes addresses and no memory. Gradients then lie at the heap's end.
That is moved out again as far as they may need, behind huge pages; a suspend gives all of it back.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import malloc
from .host import ask_for_huge_pages

#: Holes are plugged by pieces of 64 MiB to 128 KiB, larger ones by several; each is about 0.84 of the last.
#: Smaller holes are left: plugging one may take a page, and small pieces go into them all the same.
_SIZES = [int(2 ** (quarter / 4)) for quarter in range(4 * 26, 4 * 17 - 1, -1)]
#: A piece larger than nearly all holes, and how many are asked for at most until the end has moved. For a
#: state that is smaller than one nothing is done.
_PIECE_BYTES, _MOST_PIECES = 16 << 20, 8

_plugged = False


def settle(sizes: Sequence[int]) -> None:
    """Make it good for gradients, when storages of these sizes are about to come back elsewhere.

    Called by the main thread; in another one it does little, because that has a heap of its own.
    """
    global _plugged
    nbytes = sum(sizes)
    malloc.tell(malloc.TRIM_THRESHOLD, min(malloc.KEPT_BYTES + 2 * nbytes, malloc.MOST_BYTES))
    if nbytes < _PIECE_BYTES or not malloc.main_heap_start():
        return
    if not _plugged:
        _plugged = True
        _plug(sorted(set(sizes), reverse=True))
    _move_end(min(nbytes, malloc.MOST_BYTES))


def _plug(storages: Sequence[int]) -> None:
    """Take all holes and leave them so; first by the sizes of what has left some, which fits exactly."""
    holes = range(malloc.main_heap_start(), malloc.main_heap_end() - malloc.free_end_bytes())
    for nbytes in (*storages, *_SIZES):
        while (piece := malloc.take(nbytes)) in holes:
            pass
        malloc.give_back(piece)


def _move_end(nbytes: int) -> None:
    """Have ``nbytes`` free at its end; all of it is to come in huge pages, later holes, too."""
    end = malloc.main_heap_end()
    pieces: list[int] = []
    with malloc.meanwhile(malloc.TOP_PAD, nbytes, malloc.USUAL_BYTES):
        while malloc.main_heap_end() == end and len(pieces) < _MOST_PIECES:
            pieces.append(malloc.take(_PIECE_BYTES))
        for piece in pieces:
            malloc.give_back(piece)
    start = malloc.main_heap_start()
    ask_for_huge_pages(start, malloc.main_heap_end() - start)
