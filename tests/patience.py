"""How long tests wait for what has to happen."""

from __future__ import annotations

#: It costs nothing when all is well, so it is many times what anything takes on a slow and busy machine.
PATIENCE_S = 600.0
PATIENCE_MS = 600_000
