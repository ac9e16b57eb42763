"""Snapshots go from node to node of a Ray cluster, whoever is killed meanwhile."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest

from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.errors import CorruptSnapshotError, NodeLostError, RamDiskFullError, UsageError
from gpuslice.nodes.shipping import Shipment, ship

from ..conftest import Finished, Workshop
from ..test_gangs import ALL_ALIVE, EPOCHS, SCRIPT, digests, run, was_killed
from ..test_restart import TRAIN
from .conftest import RayNodes
from .synthetic import boundaries, found, storages, take

pytestmark = pytest.mark.ray

#: Ten pieces, each of which is a portion by itself.
SIZES = (40_000_000,)
PORTION_BYTES = 1 << 20


def shipped(
    rays: RayNodes, job: str, during: Callable[[], object] | None = None, *, after: int = 1
) -> Shipment:
    """From a to b; ``during`` is called when so many portions have arrived."""
    arrived = []

    def progress(nbytes: int, total: int) -> None:
        assert nbytes <= total
        arrived.append(nbytes)
        if during is not None and len(arrived) == after + 1:  # the first call is before any portion
            during()

    a, b = rays.find("a"), rays.find("b")
    return ship(job, a, b, portion_bytes=PORTION_BYTES, progress=progress)


def test_a_snapshot_arrives_and_is_not_sent_twice(rays: RayNodes) -> None:
    contents = [storages(rank) for rank in range(2)]
    take(rays.ramdisk("a"), "plain", 4, contents)
    first, second = shipped(rays, "plain"), shipped(rays, "plain")
    assert (first.boundary, first.ranks, first.sent_bytes) == (4, 2, first.payload_bytes)
    assert second.sent_bytes == 0
    assert [found(rays.ramdisk("b"), "plain", 4, rank) for rank in range(2)] == contents


@pytest.mark.parametrize(("node", "kind", "ranks"), [("a", "Sender", 2), ("b", "Receiver", 2)])
def test_an_end_that_is_killed_in_the_middle_is_replaced(
    rays: RayNodes, node: str, kind: str, ranks: int
) -> None:
    job = f"killed-{kind}-{ranks}"
    contents = [storages(rank, SIZES) for rank in range(ranks)]
    take(rays.ramdisk("a"), job, 4, contents)
    # Of two ranks the last portions of the one and the first of the other are on their way then.
    shipment = shipped(rays, job, lambda: rays.kill_actor(node, kind), after=8)
    assert [found(rays.ramdisk("b"), job, 4, rank) for rank in range(ranks)] == contents
    # What was known to have arrived did not go again.
    assert 0 < shipment.sent_bytes <= shipment.payload_bytes


def test_a_source_that_is_killed_and_comes_back_sends_the_rest(rays: RayNodes) -> None:
    c, b = rays.add("c"), rays.find("b")
    take(rays.ramdisk("c"), "back", 4, [storages(1, SIZES)])
    sent = []

    def progress(nbytes: int, total: int) -> None:
        sent.append(nbytes)
        if len(sent) == 3:
            rays.kill("c")

    with pytest.raises(NodeLostError):
        ship("back", c, b, portion_bytes=PORTION_BYTES, progress=progress)
    assert boundaries(rays.ramdisk("b"), "back") == [set()]
    rest = ship("back", rays.add("c"), b, portion_bytes=PORTION_BYTES)
    assert found(rays.ramdisk("b"), "back", 4) == storages(1, SIZES)
    assert 0 < rest.sent_bytes <= rest.payload_bytes - sent[-1]
    rays.kill("c")


def test_damage_at_the_source_ends_it_and_nothing_is_published(
    rays: RayNodes, caplog: pytest.LogCaptureFixture
) -> None:
    take(rays.ramdisk("a"), "damaged", 4, [storages(1, SIZES)])

    def flip() -> None:
        with (rays.ramdisk("a") / "damaged.r0" / "A.gsnp").open("r+b") as file:
            for at in range(5_000_000, 40_000_000, 4_000_000):
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))

    with pytest.raises(CorruptSnapshotError, match="changed since it was checked"):
        shipped(rays, "damaged", flip)
    assert boundaries(rays.ramdisk("b"), "damaged") == [set()]
    assert "Unhandled" not in caplog.text  # Ray would say of other portions that they failed, too


def test_a_full_ram_disk_is_an_error_of_the_target_and_changes_nothing(rays: RayNodes) -> None:
    for ranks in (1, 2):
        job = f"full-{ranks}"
        take(rays.ramdisk("a"), job, 4, [storages(rank, SIZES) for rank in range(ranks)])
        take(rays.ramdisk("b"), job, 3, [storages(rank) for rank in range(ranks)])
        RamDisk(rays.ramdisk("b")).collect()  # what other tests left half sent, which would make room
        before = RamDisk(rays.ramdisk("b")).used_bytes
        b = rays.find("b", ramdisk_limit=str(before + 30_000_000))
        with pytest.raises(RamDiskFullError, match=str(rays.ramdisk("b"))):
            ship(job, rays.find("a"), b)
        assert boundaries(rays.ramdisk("b"), job, ranks) == [{3}] * ranks
        assert RamDisk(rays.ramdisk("b")).used_bytes <= before


def test_what_cannot_be_is_said(rays: RayNodes) -> None:
    a, b = rays.find("a"), rays.find("b")
    with pytest.raises(UsageError, match="is on node a already"):
        ship("plain", a, a)
    with pytest.raises(UsageError, match="no whole snapshot"):
        ship("nobody", a, b)
    with pytest.raises(UsageError, match=r"no living node is called x \(name one of a \(.*b \("):
        rays.find("x")
    assert rays.find(a.id[:12]) == a


def command(rays: RayNodes, workshop: Workshop, *words: str) -> Finished:
    return workshop.execute([sys.executable, "-m", "gpuslice", "ship", *words, "--ray", rays.address])


def on(rays: RayNodes, node: str, workshop: Workshop, *words: str) -> Finished:
    """``gpuslice run`` as on that node."""
    workshop.ramdisk = rays.ramdisk(node)
    return workshop.gpuslice_run(*words)


def test_a_training_killed_on_one_node_goes_on_on_the_other_bit_for_bit(
    rays: RayNodes, warm_workshop: Workshop
) -> None:
    script = str(warm_workshop.write("train.py", TRAIN))
    undisturbed = warm_workshop.python(script, "0", "0")
    assert undisturbed.returncode == 0, undisturbed.stderr
    words = ("--job", "train", "--continue-anyway", "--suspend-every", "3", script, "0")
    assert on(rays, "a", warm_workshop, *words, "8").returncode == -9
    done = command(rays, warm_workshop, "train", "--to", "b", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["boundary"] > 0
    finished = on(rays, "b", warm_workshop, *words, "0")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == undisturbed.stdout.splitlines()[-1]
    assert finished.stdout.count("batch") < undisturbed.stdout.count("batch")


def test_a_gang_of_which_a_rank_was_killed_goes_on_on_the_other_node_bit_for_bit(
    rays: RayNodes, warm_workshop: Workshop
) -> None:
    directory = warm_workshop.directory / "undisturbed"
    directory.mkdir()
    done = warm_workshop.python(str(SCRIPT), str(directory), "2", EPOCHS, *ALL_ALIVE)
    assert done.returncode == 0, done.stderr
    undisturbed = digests(directory)
    named = ("--job", "gang", "--continue-anyway", "--checkpoint-every", "2")
    warm_workshop.ramdisk = rays.ramdisk("a")
    killed = run(warm_workshop, "2", "first", *named, dies=("1", "5"))
    was_killed(warm_workshop, "first", 1, killed.returncode, killed.stderr)
    assert shipped(rays, "gang").ranks == 2
    warm_workshop.ramdisk = rays.ramdisk("b")
    finished = run(warm_workshop, "2", "second", *named)
    assert finished.returncode == 0, finished.stderr
    continued = digests(warm_workshop.directory / "second")
    assert len(continued) == 2
    for name, of_rank in continued.items():
        assert int(of_rank.pop("done")) < int(undisturbed[name].pop("done"))  # it has not begun anew
        assert of_rank == undisturbed[name]


def test_the_command_explains_what_is_wrong(rays: RayNodes, workshop: Workshop) -> None:
    unknown = command(rays, workshop, "nobody", "--to", "b")
    assert unknown.returncode == 2
    assert "no node besides b has a whole snapshot of nobody" in unknown.stderr
    nowhere = workshop.execute(
        [sys.executable, "-m", "gpuslice", "ship", "x", "--to", "b", "--ray", "127.0.0.1:1"]
    )
    assert nowhere.returncode == 3
    assert "no Ray cluster answers at 127.0.0.1:1" in nowhere.stderr
