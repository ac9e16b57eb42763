"""Which moves are refused before their jobs are suspended, as a node has no room for their states."""

from __future__ import annotations

import msgspec
import pytest

from gpuslice.daemon.node_reports import NodeReports
from gpuslice.errors import RamDiskFullError
from gpuslice.node_agents.preflight import Facts
from gpuslice.nodes.plan import Found
from gpuslice.sched_core.lifecycle.events import Held, Moved, NoRoom, Noted, Released

from ...sched_core.driver import Driver, suspended

TO_B = Moved("a", ("b/null:0",))


def reports(room_bytes: int, *, spills: bool = False) -> NodeReports:
    """Return the reports of node b, which has this room in its RAM disk. Of others nothing is known."""
    made = NodeReports([Found(name, "", "", "") for name in ("", "b")])
    facts = Facts("", "", "", "", "/dev/shm/x", room_bytes, (), (), (), True, 0.0, spills)
    made.judge("b", msgspec.json.encode(facts), joins=False)
    return made


def trains(*, has_parked: bool = True) -> Driver:
    """Return a driver whose job a trains. Its state is known to have 100 bytes if it has parked."""
    driver = Driver(1, None, ("", "b", "c"))
    driver.submit("a")
    driver.hello("a")
    driver.resumed("a")
    driver.progress("a", 5)
    if has_parked:
        driver.do(Held("a"))
        driver.say("a", msgspec.structs.replace(suspended(driver.core.jobs["a"].epoch, 6), nbytes=100))
        driver.do(Released("a"))
        driver.resumed("a")
    return driver


def admit(driver: Driver, made: NodeReports, request: Moved = TO_B) -> None:
    made.admit_move(driver.core, driver.job_history.copies, request)


def test_a_move_to_a_node_without_room_is_refused() -> None:
    with pytest.raises(RamDiskFullError, match=r"node b has 99 B left in its RAM disk, .* needs 100 B"):
        admit(trains(), reports(99))
    admit(trains(), reports(100))


def test_a_state_of_unknown_size_needs_some_room() -> None:
    with pytest.raises(RamDiskFullError, match="needs more"):
        admit(trains(has_parked=False), reports(0))
    admit(trains(has_parked=False), reports(1))


def test_a_job_that_has_no_state_needs_none() -> None:
    driver = Driver(1, None, ("", "b", "c"))
    driver.submit("a")
    admit(driver, reports(0))


@pytest.mark.parametrize("device", ["null:0", "c/null:0"])
def test_nothing_is_refused_where_the_state_is_or_where_the_room_is_not_known(device: str) -> None:
    admit(trains(), reports(0), Moved("a", (device,)))


def test_nothing_is_refused_where_a_full_ram_disk_makes_room_or_a_copy_is_there() -> None:
    admit(trains(), reports(0, spills=True))
    driver = trains()
    driver.do(Noted("replicated", "a", {"from": "here", "to": "b", "age_s": 0.0}))
    admit(driver, reports(0))


def test_the_core_is_told_once_which_nodes_have_no_room_and_when_they_have() -> None:
    driver = trains()

    def changes(room_bytes: int) -> list[NoRoom]:
        found = reports(room_bytes).changes_of_room(driver.core, driver.job_history.copies)
        for change in found:
            driver.do(change)
        return found

    assert changes(100) == []
    (change,) = changes(99)
    assert change == NoRoom("a", {"b": "99 B left in its RAM disk, and its state needs 100 B"})
    assert changes(109) == []  # it would change all the time
    assert changes(110) == [NoRoom("a", {})]


def test_nothing_is_said_of_states_whose_size_is_not_known() -> None:
    driver = trains(has_parked=False)
    assert reports(0).changes_of_room(driver.core, driver.job_history.copies) == []


def test_of_a_state_that_could_not_be_brought_the_size_is_still_known() -> None:
    driver = trains()
    driver.do(Held("a"))
    driver.say("a", msgspec.structs.replace(suspended(driver.core.jobs["a"].epoch, 7), nbytes=100))
    job = driver.core.jobs["a"]
    job.relocation.carry(100)
    driver.core.state.switch_costs.forget(job)  # its processes are new
    (change,) = reports(99).changes_of_room(driver.core, driver.job_history.copies)
    assert change.nodes.keys() == {"b"}


def test_all_states_of_a_gang_need_room_on_a_node_with_as_many_devices() -> None:
    driver = Driver(2, None, ("", "b"))
    driver.submit("a", 2)
    driver.hello("a")
    driver.resumed("a", 0)
    driver.resumed("a", 1)
    driver.progress("a", 5)
    driver.do(Held("a"))
    for rank in (0, 1):
        report = msgspec.structs.replace(suspended(driver.core.jobs["a"].epoch, 6), nbytes=100)
        driver.say("a", report, rank)
    copies = driver.job_history.copies
    (change,) = reports(199).changes_of_room(driver.core, copies)
    assert change == NoRoom("a", {"b": "199 B left in its RAM disk, and its state needs 200 B"})
    assert reports(200).changes_of_room(driver.core, copies) == []
