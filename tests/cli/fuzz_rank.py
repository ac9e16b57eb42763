"""A rank that says whatever it likes, as a process of its own.

    fuzz_rank.py SEED COUNT

sends ``COUNT`` messages and says how many it has sent; ``SEED`` 0: each field of each
kind of message at its extremes, else at random. The scheduler has taken note of a message when a later one,
which it has to reject, was answered.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from itertools import islice
from random import Random

import zmq
from extremes import at_extremes, encoded, mutated, reports, varied

from gpuslice import wire

JOB = os.environ["GPUSLICE_JOB"]
_AT_ONCE = 50
_MARK = 10**6


def frames(seed: int, epoch: list[int]) -> Iterator[bytes]:
    """What is said, one after the other; ``epoch`` is the newest lease's."""
    if not seed:
        for message in reports(JOB):
            yield from at_extremes(message)
    random = Random(seed)
    while True:
        message = random.choice(reports(JOB, max(0, epoch[0] + random.choice((-1, 0, 0, 0, 0, 0, 1)))))
        if random.random() < 0.5:
            yield varied(message, random)
        elif random.random() < 0.2:
            yield random.choice(list(at_extremes(message)))
        else:
            yield mutated(wire.encode(message), random)


def main(seed: int, count: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)  # it says all it has to say, unless it is killed
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(os.environ["GPUSLICE_SOCKET"])
    socket.send(wire.encode(reports(JOB, 0)[0]))
    epoch, sent, said = [0], 0, frames(seed, [0])
    said = frames(seed, epoch)
    while batch := list(islice(said, min(_AT_ONCE, count - sent))):
        for frame in batch:
            socket.send(frame)
        sent += len(batch)
        socket.send(
            encoded(
                {"type": "hello", "version": _MARK + sent, "job": JOB, "rank": 0, "world_size": 1, "pid": 1}
            )
        )
        while True:
            answer = wire.decode_to_agent(socket.recv())
            if isinstance(answer, wire.Resume):
                epoch[0] = answer.epoch
            if isinstance(answer, wire.Rejected) and f"version {_MARK + sent} " in answer.error:
                break
        os.write(1, f"{sent}\n".encode())


main(int(sys.argv[1]), int(sys.argv[2]))
