"""Connections of ranks on a node whose agent is started again: two agents may give the same identities."""

from __future__ import annotations

from gpuslice import wire
from gpuslice.sched_core.lifecycle.events import Reported, Tell
from gpuslice.sched_core.live.rank_sessions import RankSessions
from gpuslice.sched_core.nodes.node import Connection

FIRST, SECOND = Connection("b", b"1"), Connection("b", b"2")


class Talk:
    """What ranks say to a scheduler and what they are told."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, wire.FromAgent]] = []
        self.sent: list[tuple[Connection, wire.ToAgent]] = []
        #: The processes of each rank: the one that is it now, and those that wait to be.
        self.processes: dict[int, list[int]] = {}
        self.sessions = RankSessions(
            self._send, self._handle, lambda *words: None, lambda job, rank: self.processes.get(rank, [])
        )

    def _send(self, connection: Connection, frame: bytes) -> None:
        self.sent.append((connection, wire.decode_to_agent(frame)))

    def _handle(self, report: Reported) -> None:
        self.heard.append((report.rank, report.message))
        if isinstance(report.message, wire.Hello) and report.message.replaces:
            self.processes[report.rank] = [report.message.pid]
        elif isinstance(report.message, wire.Hello):
            there = self.processes.setdefault(report.rank, [])
            there += [report.message.pid] if report.message.pid not in there else []

    def greet(self, connection: Connection, rank: int, pid: int = 7, replaces: int = 0) -> None:
        hello = wire.Hello(
            version=wire.PROTOCOL_VERSION, job="g", rank=rank, world_size=2, pid=1, replaces=replaces
        )
        self.sessions.hear(connection, pid, wire.encode(hello))

    def order(self, rank: int) -> list[Connection]:
        """Who is told to suspend when that rank is."""
        self.sent.clear()
        self.sessions.tell(Tell("g", rank, wire.Suspend(epoch=1, stop_at=9)))
        return [connection for connection, _ in self.sent]


def test_ranks_that_come_back_in_another_order_are_told_apart() -> None:
    talk = Talk()
    talk.greet(FIRST, 0)
    talk.greet(SECOND, 1)
    talk.sessions.forget("b")
    talk.greet(FIRST, 1)
    assert (talk.order(0), talk.order(1)) == ([], [FIRST])
    talk.greet(SECOND, 0)
    assert (talk.order(0), talk.order(1)) == ([SECOND], [FIRST])
    talk.sessions.hear(FIRST, 7, wire.encode(wire.Progress(epoch=1, boundary=5, step=5)))
    rank, said = talk.heard[-1]
    assert (rank, type(said)) == (1, wire.Progress)


def test_ranks_of_other_nodes_are_not_forgotten() -> None:
    talk = Talk()
    talk.greet(FIRST, 0)
    talk.sessions.forget("c")
    assert talk.order(0) == [FIRST]


def test_only_the_process_that_is_a_rank_is_heard_and_told_what_the_rank_is() -> None:
    talk = Talk()
    talk.greet(FIRST, 0)
    talk.greet(SECOND, 0, pid=8)
    assert talk.order(0) == [FIRST]
    heard = list(talk.heard)
    talk.sessions.hear(SECOND, 8, wire.encode(wire.Progress(epoch=1, boundary=5, step=5)))
    assert talk.heard == heard
    talk.sent.clear()
    talk.sessions.tell(Tell("g", 0, wire.Queued(behind=7), pid=8))
    assert talk.sent == [(SECOND, wire.Queued(behind=7))]
    talk.processes[0] = [8]  # the first has ended
    assert talk.order(0) == [SECOND]
    talk.sessions.hear(SECOND, 8, wire.encode(wire.Progress(epoch=1, boundary=5, step=5)))
    assert talk.heard[-1][1] == wire.Progress(epoch=1, boundary=5, step=5)


def test_a_process_whose_rank_another_one_has_taken_is_told_so() -> None:
    talk = Talk()
    talk.greet(FIRST, 0)
    talk.greet(SECOND, 0, pid=8, replaces=7)
    talk.sent.clear()
    talk.sessions.tell(Tell("g", 0, wire.Replaced(), pid=7))
    assert talk.sent == [(FIRST, wire.Replaced())]
    assert talk.order(0) == [SECOND]
