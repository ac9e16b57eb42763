"""Connections of ranks on a node whose agent is started again: two agents may give the same identities."""

from __future__ import annotations

from gpuslice import wire
from gpuslice.sched_core.core.events import Reported, Tell
from gpuslice.sched_core.live.rank_sessions import RankSessions
from gpuslice.sched_core.nodes.node import Connection

FIRST, SECOND = Connection("b", b"1"), Connection("b", b"2")


class Talk:
    """What ranks say to a scheduler and what they are told."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, wire.FromAgent]] = []
        self.sent: list[tuple[Connection, wire.ToAgent]] = []
        self.sessions = RankSessions(self._send, self._handle, lambda *words: None)

    def _send(self, connection: Connection, frame: bytes) -> None:
        self.sent.append((connection, wire.decode_to_agent(frame)))

    def _handle(self, report: Reported) -> None:
        self.heard.append((report.rank, report.message))

    def greet(self, connection: Connection, rank: int) -> None:
        hello = wire.Hello(version=wire.PROTOCOL_VERSION, job="g", rank=rank, world_size=2, pid=7)
        self.sessions.hear(connection, 7, wire.encode(hello))

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
