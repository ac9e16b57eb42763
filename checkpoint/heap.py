"""What the garbage collector knows: the process's objects, less those that were there before any tensor.

Importing torch leaves some 300,000 objects behind, and looking at them would be most of a sweep's time.
"""

from __future__ import annotations

import gc
from collections.abc import Set
from itertools import compress


class _Witness:
    """An object that must be seen in every look at the heap; if it is not, the script froze the heap.

    ``gc.get_freeze_count()`` would tell, too, but it walks through all frozen objects.
    """


# A script may have frozen its objects before it imported us.
gc.unfreeze()
_witness = _Witness()


def hide_imports() -> None:
    """Freeze everything that is alive, once torch is imported and before the script makes its first tensor.

    The collector, and every look at the heap, then pass these objects over.
    """
    global _witness
    gc.freeze()
    _witness = _Witness()


def instances(types: Set[type]) -> list[object]:
    """Every live object of exactly these types, but for hidden imports.

    Objects that the script froze are thawed first, and stay so: freezing again would also freeze whatever
    garbage there is by now, for good.
    """
    found = _look(types)
    if not any(item is _witness for item in found):
        gc.unfreeze()
        found = _look(types)
    return [item for item in found if item is not _witness]


def _look(types: Set[type]) -> list[object]:
    wanted = types | {_Witness}
    objects = gc.get_objects()
    return list(compress(objects, map(wanted.__contains__, map(type, objects))))
