"""What clients that have gone leave behind: nothing that anybody needs to read."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

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
