"""Every n-th snapshot of a job is on another node, too; that node is enough to go on."""

from __future__ import annotations

import pytest

from gpuslice.nodes.replication import Replication, forget_on, furthest, held_on

from .conftest import RayNodes
from .synthetic import boundaries, found, storages, take

pytestmark = pytest.mark.ray


def test_every_third_snapshot_is_replicated_and_the_newest_stays(rays: RayNodes) -> None:
    a, b = rays.find("a"), rays.find("b")
    replication = Replication("thirds", a, b, every=3)
    assert replication.step() is None
    kept = []
    for number in range(1, 8):
        take(rays.ramdisk("a"), "thirds", 10 * number, [storages(number)])
        shipment = replication.step()
        assert (shipment is not None) == (number % 3 == 0)
        kept.append(boundaries(rays.ramdisk("b"), "thirds"))
    assert kept == [[set()]] * 2 + [[{30}]] * 3 + [[{60}]] * 2
    assert found(rays.ramdisk("b"), "thirds", 60) == storages(6)
    # One that begins anew sees that the newest is to be replicated, then that it is.
    anew = Replication("thirds", a, b, every=3)
    assert anew.step() is not None
    assert anew.step() is None
    assert boundaries(rays.ramdisk("b"), "thirds") == [{70}]
    assert furthest("thirds", [b, a]) == b
    take(rays.ramdisk("a"), "thirds", 80, [storages(8)])
    assert furthest("thirds", [b, a]) == a
    assert furthest("nobody", [b, a]) is None
    forget_on("thirds", b)
    assert held_on("thirds", b) is None
    assert not (rays.ramdisk("b") / "thirds.r0").exists()
    assert held_on("thirds", a) is not None
