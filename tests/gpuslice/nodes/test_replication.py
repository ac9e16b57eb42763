"""Every n-th snapshot of a job is on another node, too; that node is enough to go on."""

from __future__ import annotations

import shutil

import pytest

from gpuslice.nodes.replication import Replication, forget_on, furthest, held_on

from ..conftest import Workshop
from ..test_restart import TRAIN
from .conftest import RayNodes
from .synthetic import boundaries, found, storages, take
from .test_shipping import on

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


def test_a_job_whose_node_was_killed_goes_on_from_its_replica(
    rays: RayNodes, warm_workshop: Workshop
) -> None:
    script = str(warm_workshop.write("train.py", TRAIN))
    undisturbed = warm_workshop.python(script, "0", "0")
    words = ("--job", "replicated", "--continue-anyway", "--suspend-every", "3", script, "0")
    replication = Replication("replicated", rays.add("c"), rays.find("b"), every=2)
    assert on(rays, "c", warm_workshop, *words, "8").returncode == -9
    shipment = replication.step()
    assert shipment is not None
    assert shipment.boundary > 0
    assert on(rays, "c", warm_workshop, *words, "4").returncode == -9
    rays.kill("c")
    shutil.rmtree(rays.ramdisk("c"))  # as its memory is lost with it
    finished = on(rays, "b", warm_workshop, *words, "0")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == undisturbed.stdout.splitlines()[-1]
    assert finished.stdout.count("batch") < undisturbed.stdout.count("batch")
