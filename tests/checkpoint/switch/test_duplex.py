"""Two processes swap on one device, and one of them fails, dies or stops at every step of it.

Whatever happens: the device never holds more than it has, whoever runs has its state bit for bit, whoever is
parked can go on, and a dead one's newest restartable snapshot is whole.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuslice.checkpoint.format.reader import open_snapshot
from gpuslice.checkpoint.ramdisk.listing import restartable_files
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.room_requests import request_room
from gpuslice.checkpoint.ramdisk.slots import OWNER
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.duplex import portions
from gpuslice.checkpoint.switch.swap_endpoints import PredecessorEnd, SuccessorEnd
from gpuslice.checkpoint.switch.swap_protocol import (
    Back,
    Terms,
    Whole,
)
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import RollbackError
from gpuslice.kernels.transfer import Checksums, Inspector, Pairs, Transfer

from ...patience import PATIENCE_S
from ..conftest import newest_of
from ..harness import Broken, FaultyDevice, Job, SpyGate
from ..remote import Remote
from ..swapper import Memory, limit_memory, make_memory

SPARE_BYTES = 500_000


class Scene:
    """``a`` runs, ``b`` is parked, and the device has room for ``a`` and little more.

    A portion has from 0.4 to 1.2 MB, as the addresses happen to be, and a state 2.9 MB: at least three.
    What is free besides lets ``b`` take its first one as soon as ``a`` has given two.
    """

    def __init__(self, disk: RamDisk, memory: Path, troupe: Callable[[Path, Path], Remote]) -> None:
        make_memory(memory)
        self.shared = Memory(memory)
        self.disk = disk
        self.memory = memory
        self._troupe = troupe
        self.players: dict[str, Remote] = {}
        self.nbytes = self.enter("a")
        assert self.enter("b") == self.nbytes
        self.b.ask("suspend")
        self.limit(self.nbytes + SPARE_BYTES)

    @property
    def a(self) -> Remote:
        return self.players["a"]

    @property
    def b(self) -> Remote:
        return self.players["b"]

    def enter(self, name: str) -> int:
        """A new process, which runs; bytes of its state on the device."""
        self.limit(1 << 40)
        self.players[name] = self._troupe(self.disk.directory, self.memory)
        return int(self.players[name].ask("prepare", name=name))

    def limit(self, nbytes: int) -> None:
        """Let the device have so much memory."""
        limit_memory(self.memory, nbytes)

    def begin(self) -> None:
        """Have ``a`` leave and ``b`` come."""
        self.b.ask("open", predecessor="a")
        self.b.tell("arrive")
        self.a.tell("leave", successor="b")

    def swap(self) -> dict[str, Any]:
        """The same, and what they say of it; of one that dies nothing."""
        self.begin()
        return {name: player.hear() for name, player in self.players.items()}

    def check(self, *, refusals: bool = False) -> None:
        """One after the other can go on with what it had; and nobody ever asked for more than there was.

        Afterwards ``a`` runs and ``b`` is parked.
        """
        running = [player for player in self.players.values() if player.ask("whole") != ["suspended", True]]
        assert len(running) <= 1
        for player in running:
            assert player.ask("whole") == ["running", True]
            player.ask("suspend")
        for player in (self.b, self.a):
            player.ask("resume")
            assert player.ask("whole") == ["running", True]
            player.ask("train")
            assert player.ask("refusals") == 0 or refusals
            if player is self.b:
                player.ask("suspend")

    def bury(self, name: str) -> None:
        """``name`` is dead: its restartable snapshots are whole, and nothing else is left of it."""
        self.players.pop(name).kill()
        self.disk.collect()
        path = newest_of(self.disk, name)
        assert path is not None
        files = set(restartable_files(path.parent).values())
        assert path in files
        for file in files:
            with open_snapshot(file) as snapshot:
                snapshot.verify()
        assert set(path.parent.iterdir()) == {path.parent / OWNER, *files}

    def replace(self, name: str) -> None:
        """Somebody else in the place of one that is dead."""
        survivor = self.players["b" if name == "a" else "a"]
        if survivor.ask("whole") == ["running", True]:
            survivor.ask("suspend")
        self.enter(name)
        if name == "b":
            self.b.ask("suspend")
            self.a.ask("resume")
        self.limit(self.nbytes + SPARE_BYTES)

    def end(self) -> None:
        """Nothing is left of them that `collect` does not find."""
        for player in self.players.values():
            player.kill()
        self.shared.close()
        self.disk.collect(everything=True)
        assert [entry.name for entry in self.disk.directory.iterdir()] == ["lock"]


@pytest.fixture
def scene(disk: RamDisk, tmp_path: Path, troupe: Callable[[Path, Path], Remote]) -> Iterator[Scene]:
    found = Scene(disk, tmp_path / "memory", troupe)
    yield found
    found.end()


def test_they_swap(scene: Scene) -> None:
    for _ in range(3):
        said = scene.swap()
        (_, left), (_, came) = said["a"], said["b"]
        assert left["given"] == left["freed"] == came["freed"] == scene.nbytes
        assert came["taken"] <= came["freed"]
        assert scene.b.ask("whole") == ["running", True]
        scene.check()


def test_one_comes_while_the_other_is_leaving(scene: Scene) -> None:
    scene.a.ask("arm", number=14, action="stop")  # three portions are gone
    scene.begin()
    assert scene.a.hear() == "stopping"
    ends_s = time.monotonic() + PATIENCE_S
    while not scene.shared.held_by(scene.b.pid):
        assert time.monotonic() < ends_s
        time.sleep(0.01)
    scene.a.go_on()
    left, came = scene.a.result(), scene.b.result()
    assert left["given"] == scene.nbytes
    assert came["taken"] > 0
    scene.a.ask("left")
    scene.check()


#: In at least so many steps something can happen; in how many more depends on who is quicker.
STEPS = {("a", "fail"): 9, ("b", "fail"): 2, ("a", "kill"): 12, ("b", "kill"): 3}


@pytest.mark.parametrize("player", ["a", "b"])
def test_one_fails_at_any_step(scene: Scene, player: str) -> None:
    for number in range(1, 100):
        scene.players[player].ask("arm", number=number, action="fail")
        said = scene.swap()
        if scene.players[player].ask("left") > 0:
            break
        # Who fails is as it was; the other one has left in any case, or could not come.
        assert said[player][0] == "Broken"
        assert said["a" if player == "b" else "b"][0] == ("ok" if player == "b" else "HandoverError")
        scene.check()
    assert [kind for kind, _ in said.values()] == ["ok", "ok"]
    assert number > STEPS[player, "fail"]


@pytest.mark.parametrize("player", ["a", "b"])
def test_one_dies_at_any_step(scene: Scene, player: str) -> None:
    for number in range(1, 100):
        scene.players[player].ask("arm", number=number, action="kill")
        said = scene.swap()
        if said[player] is not None:
            break
        scene.bury(player)
        survivor = next(iter(scene.players.values()))
        assert said["a" if player == "b" else "b"][0] == "ok"
        assert survivor.ask("whole") == (["running", True] if player == "a" else ["suspended", True])
        assert survivor.ask("refusals") == 0
        scene.replace(player)
    assert [kind for kind, _ in said.values()] == ["ok", "ok"]
    assert number > STEPS[player, "kill"]


def test_a_predecessor_that_stops_is_not_waited_for_for_ever(scene: Scene) -> None:
    scene.b.ask("patient", seconds=4.0)
    scene.a.ask("arm", number=6, action="stop")
    scene.begin()
    assert scene.a.hear() == "stopping"
    assert scene.b.hear()[0] == "HandoverError"
    assert scene.shared.held_by(scene.b.pid) == 0
    scene.a.go_on()
    assert scene.a.hear()[0] == "ok"
    scene.a.ask("left")
    scene.check()


@pytest.mark.parametrize("number", [1, 3])
def test_a_successor_that_stops_holds_nobody_up(scene: Scene, number: int) -> None:
    scene.a.ask("patient", seconds=1.0)  # until there is an answer to its offer
    scene.b.ask("arm", number=number, action="stop")
    scene.begin()
    assert [scene.b.hear(), scene.a.hear()[0]] == ["stopping", "ok"]
    scene.b.go_on()
    assert scene.b.hear()[0] == "ok"
    scene.b.ask("left")
    scene.check()


def fail_while_the_other_has_memory(scene: Scene) -> None:
    """``a`` fails when ``b``, which has taken memory, has stopped; nothing else of the device is free."""
    scene.b.ask("arm", number=3, action="stop")
    scene.a.ask("arm", number=9, action="stop and fail")
    scene.begin()
    assert [scene.a.hear(), scene.b.hear()] == ["stopping", "stopping"]
    held = [scene.shared.held_by(player.pid) for player in scene.players.values()]
    assert min(held) > 0
    scene.limit(sum(held))
    scene.a.go_on()


def test_one_that_failed_waits_for_the_other_to_give_back(scene: Scene) -> None:
    """However long that takes: its memory is in the other's hands."""
    fail_while_the_other_has_memory(scene)
    assert scene.a.is_waiting(1.0)
    scene.limit(scene.nbytes)
    scene.b.go_on()
    assert [scene.a.hear()[0], scene.b.hear()[0]] == ["Broken", "HandoverError"]
    for player in scene.players.values():
        player.ask("left")
    scene.check()


def test_one_that_failed_has_its_memory_back_when_the_other_dies(scene: Scene) -> None:
    """It is out of patience by then, and has tried without a word of the other's, in vain."""
    scene.a.ask("patient", seconds=4.0)
    fail_while_the_other_has_memory(scene)
    assert scene.a.is_waiting(5.5)
    scene.limit(scene.nbytes)
    scene.bury("b")
    assert scene.a.hear()[0] == "Broken"
    assert scene.a.ask("whole") == ["running", True]
    assert scene.a.ask("refusals") > 0


def test_an_allocator_that_takes_more_than_the_sum_waits_for_more(scene: Scene) -> None:
    scene.b.ask("patient", seconds=60.0, overhead=1.2)
    scene.limit(2 * scene.nbytes)  # in the end it fits
    said = scene.swap()
    assert [kind for kind, _ in said.values()] == ["ok", "ok"]
    scene.check(refusals=True)


def test_what_would_not_fit_in_the_end_is_not_begun(scene: Scene) -> None:
    """Then ``a`` gives nothing back before it is published, and ``b`` meets a device that is too small."""
    scene.limit(scene.nbytes - 1)
    said = scene.swap()
    assert said["a"][1]["given"] == 0
    assert said["b"][0] == "DeviceMemoryError"
    scene.limit(scene.nbytes)
    scene.check(refusals=True)


def test_nobody_who_waits_is_no_problem(scene: Scene) -> None:
    assert scene.a.ask("leave", successor="b")["given"] == 0
    assert scene.a.ask("whole") == ["suspended", True]
    scene.check()


def test_portions_are_whole_regions() -> None:
    assert portions([], [], 10) == []
    assert portions([4, 4, 4, 4], [0, 1, 2, 3], 8) == [[0, 1], [2, 3]]
    assert portions([4, 4, 4, 4], [7, 5, 7, 5], 1) == [[1, 3], [0, 2]]
    assert portions([1, 100, 1], [2, 0, 1], 8) == [[1], [2, 0]]


class Agreeing:
    """A successor that takes part in everything, and has given back what it never took."""

    def __init__(self) -> None:
        self._here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.predecessor = PredecessorEnd(there, 60.0, portion_bytes=1)

    def meet(self, nbytes: int) -> PredecessorEnd:
        self.predecessor.problem = ""
        self._here.send(msgspec.msgpack.encode(Back()))
        return self.predecessor

    def heard(self) -> list[str]:
        """What it was told, by its names."""
        self._here.setblocking(False)
        names = []
        with suppress(BlockingIOError):
            while data := self._here.recv(1 << 14):
                names.append(str(msgspec.msgpack.decode(data)["type"]))
        self._here.close()
        return names


class Failing(FaultyDevice):
    """The fourth copy out fails, and something may happen to the arena before."""

    def __init__(self, damage: bool) -> None:
        super().__init__()
        self.damage = damage
        self.left = 4

    def copy_out(
        self,
        pairs: Pairs,
        arena: memoryview,
        inspect: Inspector | None = None,
        checksums: Checksums | None = None,
    ) -> Transfer:
        self.left -= 1
        if self.left == 0:
            if self.damage:
                arena[:] = bytes(len(arena))
            raise Broken("copy_out")
        return super().copy_out(pairs, arena, inspect, checksums)


@pytest.mark.parametrize("damage", [False, True])
def test_what_comes_back_is_compared_with_what_left(store: JobStore, job: Job, damage: bool) -> None:
    before, gate, successor = job.digest(), SpyGate(), Agreeing()
    switch = Switch(Failing(damage), store, gate=gate)
    with pytest.raises(RollbackError if damage else Broken):
        switch.suspend(boundary=1, successor=successor)  # type: ignore[arg-type]
    assert gate.is_shut is damage
    assert successor.heard() == ["gave", "gave", "failed"]
    if not damage:
        assert job.digest() == before
        switch.suspend(boundary=2)
        switch.resume()
        assert job.digest() == before


def test_a_snapshot_that_was_spilled_meanwhile_is_brought_back_first(shm: Path, tmp_path: Path) -> None:
    disk = RamDisk(shm / "spilling", 64 << 20, spill_directory=tmp_path / "spill")
    with disk.open_store("b") as store:
        job, switch = Job(), Switch(FaultyDevice(), store)
        before = job.digest()
        switch.suspend(boundary=1)
        assert switch.snapshot is not None
        with store.offering(switch.snapshot):
            assert request_room(store.directory)
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here.send(msgspec.msgpack.encode(Whole()))
        switch.resume(swap=SuccessorEnd(there, Terms("a", "b", 1, "cpu"), 60.0, portion_bytes=1))
        assert job.digest() == before
        here.close()
