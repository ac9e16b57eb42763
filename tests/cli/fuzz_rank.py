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

import msgspec
import zmq
from extremes import EXTREMES, at_an_extreme, at_extremes, encoded, mutated, reports, varied

from gpuslice import wire

JOB = os.environ["GPUSLICE_JOB"]
_AT_ONCE = 250
_MARK = 10**6
#: What the scheduler waits for an answer to.
Order = wire.Resume | wire.Suspend


def frames(seed: int, orders: list[Order]) -> Iterator[bytes]:
    """What is said, one after the other; the newest order is the last of ``orders``."""
    if not seed:
        for message in reports(JOB):
            yield from at_extremes(message)
    random, answered = Random(seed), list[Order]()
    while True:
        if orders and orders[-1] not in answered:
            answered.append(orders[-1])
            yield from answers(orders[-1], sum(type(one) is type(orders[-1]) for one in answered) - 1)
        epoch = orders[-1].epoch if orders else 0
        message = random.choice(reports(JOB, max(0, epoch + random.choice((-1, 0, 0, 0, 0, 0, 1)))))
        if isinstance(message, wire.Bye | wire.Suspended | wire.Resumed) and random.random() < 0.99:
            continue  # nothing counts after a Bye; the others are left for the answers
        if random.random() < 0.5:
            yield varied(message, random)
        elif random.random() < 0.1:
            yield at_an_extreme(message, random)
        else:
            yield mutated(wire.encode(message), random)


def answers(order: Order, number: int) -> Iterator[bytes]:
    """What may follow ``order``: one field (by ``number``) at its extremes, and at last what is meant."""
    stages_s = {"copy_out_s": 0.25, "reserve_s": 0.25}
    message: wire.FromAgent = wire.Resumed(epoch=order.epoch, boundary=0, stages_s=stages_s)
    names = ("stages_s", "boundary")
    if isinstance(order, wire.Suspend):
        message = wire.Suspended(
            epoch=order.epoch, boundary=order.stop_at, step=11, nbytes=1 << 20, stages_s=stages_s
        )
        names = ("nbytes", "stages_s", "step", "boundary")
    fields = msgspec.to_builtins(message)
    for value in EXTREMES:
        yield encoded({**fields, names[number % len(names)]: value})
    yield encoded(fields)


def main(seed: int, count: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)  # it says all it has to say, unless it is killed
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(os.environ["GPUSLICE_SOCKET"])
    socket.send(wire.encode(reports(JOB, 0)[0]))
    orders: list[Order] = []
    sent, said = 0, frames(seed, orders)
    while batch := list(islice(said, min(_AT_ONCE, count - sent))):
        for frame in batch:
            socket.send(frame)
        sent += len(batch)
        mark = {"type": "hello", "version": _MARK + sent, "job": JOB, "rank": 0, "world_size": 1, "pid": 1}
        socket.send(encoded(mark))
        while True:
            heard = wire.decode_to_agent(socket.recv())
            if isinstance(heard, Order):
                orders[:] = [heard]
            if isinstance(heard, wire.Rejected) and f"version {_MARK + sent} " in heard.error:
                break
        os.write(1, f"{sent}\n".encode())


main(int(sys.argv[1]), int(sys.argv[2]))
