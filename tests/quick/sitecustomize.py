"""For the Pythons that tests start: they collect garbage rarely, and none as they end.

Torch's import, and that of what an optimizer needs, make half a million objects. To look through them again
and again, and once more at the end, would be 40 % of the processor time of a short script.
"""

import atexit
import gc

gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)  # before all others, so it is called after them
