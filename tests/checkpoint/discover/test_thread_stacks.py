"""Stacks of running threads are taken whole, and no garbage is collected in the midst of that."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from gpuslice.checkpoint.discover import thread_stacks
from gpuslice.checkpoint.discover.thread_stacks import stack_of, stacks

from ...patience import PATIENCE_S


@contextmanager
def another_thread() -> Iterator[int]:
    """Goes up and down through frames of many sizes until it is stopped."""
    stop, began = threading.Event(), threading.Event()

    def descend(depth: int, *more: int) -> int:
        return descend(depth - 1, *more, depth) if depth else len(more)

    def body() -> None:
        while not stop.is_set():
            descend(20)
            began.set()

    thread = threading.Thread(target=body)
    thread.start()
    assert began.wait(PATIENCE_S)
    try:
        yield thread.ident or 0
    finally:
        stop.set()
        thread.join(PATIENCE_S)


def all_of(ident: int) -> list[FrameType]:
    return stacks()[ident]


@pytest.mark.parametrize("look", [stack_of, all_of])
def test_nothing_is_collected_while_frames_are_made(
    look: Callable[[int], list[FrameType]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, collects = thread_stacks.stack, []

    def watched(frame: FrameType | None) -> Iterator[FrameType]:
        for one in found(frame):
            collects.append(gc.isenabled())
            yield one

    monkeypatch.setattr(thread_stacks, "stack", watched)
    with another_thread() as ident:
        names = [frame.f_code.co_name for frame in look(ident)]
    assert names[-3:] == ["run", "_bootstrap_inner", "_bootstrap"]
    assert len(collects) >= len(names)
    assert not any(collects)
    assert gc.isenabled()


def test_a_thread_that_is_gone_has_no_frames() -> None:
    with another_thread() as ident:
        pass
    assert stack_of(ident) == []
