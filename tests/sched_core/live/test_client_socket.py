"""What clients that have gone leave behind: nothing that anybody needs to read."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from gpuslice import verbs
from gpuslice.sched_core.live.client_socket import ClientSocket


def test_an_answer_to_a_client_that_has_gone_is_no_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with zmq.Context() as context:
        scheduler: Any = SimpleNamespace(context=context, register=lambda source, handler: None)
        clients = ClientSocket(scheduler, tmp_path, cast(Any, None), cast(Any, None))
        clients._awaiting_shutdown.append((clients._sockets[0], b"gone"))
        with caplog.at_level(logging.DEBUG):
            clients.close()
    (line,) = [record for record in caplog.records if "could not be sent" in record.message]
    assert line.levelno == logging.DEBUG


def test_clients_that_wait_for_a_job_are_forgotten_when_they_no_longer_ask(tmp_path: Path) -> None:
    job = SimpleNamespace(id="a", over=False, guaranteed=None)
    now_s = [0.0]
    with zmq.Context() as context:
        core = SimpleNamespace(jobs={"a": job})
        scheduler: Any = SimpleNamespace(
            context=context, core=core, now=lambda: now_s[0], register=lambda source, handler: None
        )
        clients = ClientSocket(scheduler, tmp_path, cast(Any, None), cast(Any, None))
        (socket,) = clients._sockets
        for request, waiting in (
            (verbs.Wait(job="a"), clients._awaiting_end),
            (verbs.Admission(job="a"), clients._awaiting_guarantee),
        ):
            now_s[0] = 0.0
            for number in range(100):  # `gpuslice logs -f` comes with a new socket each time
                clients._answer((socket, b"patient"), request)
                clients._answer((socket, b"gone %d" % number), request)
                now_s[0] += 2.0
            waits = [identity for _, identity in waiting["a"]]
            assert waits == [*(b"gone %d" % number for number in range(69, 99)), b"patient", b"gone 99"]
        clients.close()
