"""A value in a store of torch's that all ranks change, whoever is quicker and whatever the store does."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from gpuslice.runtime.shared_value import SharedValue, StoreUnavailableError, default_store

from ...patience import PATIENCE_S

#: Makes a store for each rank; all have the same content.
Connect = Callable[[], dist.Store]


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def connect(tmp_path: Path, request: pytest.FixtureRequest) -> Connect:
    if request.param == "file":
        return lambda: dist.FileStore(str(tmp_path / "store"), -1)
    if request.param == "tcp":
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return lambda: server and dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    shared = dist.HashStore()
    return lambda: shared if request.param == "hash" else dist.PrefixStore("default_pg", shared)


def one_more(value: str) -> str:
    return str(int(value or 0) + 1)


def seen(value: SharedValue) -> list[str]:
    """What a change sees in the end."""
    found: list[str] = []

    def change(value: str) -> str:
        found[:] = [value]
        return f"{value} seen"

    value.update(change)
    return found


def test_no_change_of_any_rank_is_lost(connect: Connect) -> None:
    def count(rank: str) -> None:
        store = connect()
        value = SharedValue(lambda: store, PATIENCE_S)
        numbers = itertools.count()  # a race that is lost takes one more
        for _ in range(50):
            value.update(lambda value: f"{value} {rank}{next(numbers)}")

    ranks = [threading.Thread(target=count, args=(rank,)) for rank in "abc"]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    store = connect()
    (changes,) = seen(SharedValue(lambda: store))
    for rank in "abc":
        assert len(re.findall(rank, changes)) == 50


def test_in_a_store_made_anew_the_value_is_begun_anew(connect: Connect) -> None:
    stores = [dist.HashStore(), connect()]
    value = SharedValue(lambda: stores[0])
    value.update(one_more)
    value.update(one_more)
    del stores[0]
    value.update(one_more)
    assert seen(SharedValue(lambda: stores[0])) == ["1"]


class HeldStore:
    """Does not answer until it is let go."""

    def __init__(self) -> None:
        self.asked = 0
        self.let_go = threading.Event()
        self.store = dist.HashStore()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.asked += 1
        assert self.let_go.wait(PATIENCE_S)
        return self.store.compare_set(key, expected, desired)


def test_a_store_that_does_not_answer_is_awaited_up_to_a_deadline_and_once() -> None:
    held = HeldStore()
    value = SharedValue(lambda: held, 0.01)  # type: ignore[arg-type, return-value]
    SharedValue(lambda: held.store).update(one_more)  # so that a race is lost
    with pytest.raises(StoreUnavailableError, match=r"not answered within 0\.01 s"):
        value.update(one_more)
    (late,) = (thread for thread in threading.enumerate() if thread.name == "gpuslice-store")
    with pytest.raises(StoreUnavailableError, match="yet to answer"):
        value.update(one_more)
    held.let_go.set()
    late.join()
    assert held.asked == 1, "nobody wants that change any more"
    value = SharedValue(lambda: held, PATIENCE_S)  # type: ignore[arg-type, return-value]
    assert seen(value) == ["1"]


def test_a_server_that_is_gone_fails_a_change_and_nothing_else() -> None:
    server = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    client = dist.TCPStore("127.0.0.1", server[0].port, wait_for_workers=False)
    value = SharedValue(lambda: client)
    value.update(one_more)
    server.clear()
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            value.update(one_more)


def test_another_thread_that_waits_in_the_store_delays_no_caller_beyond_the_deadline() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    waiting = threading.Thread(target=client.wait, args=(["key"], timedelta(seconds=PATIENCE_S)))
    waiting.start()
    value = SharedValue(lambda: client, 0.01)
    refused = 0
    while not refused:  # until the other one has begun to wait
        try:
            value.update(one_more)
        except StoreUnavailableError:
            refused += 1
    server.set("key", "")
    waiting.join()


def test_a_mistake_of_ours_is_no_failure_of_the_store() -> None:
    store = dist.HashStore()
    with pytest.raises(ZeroDivisionError):
        SharedValue(lambda: store).update(lambda value: str(1 // 0))


def test_without_a_process_group_there_is_no_store() -> None:
    with pytest.raises(StoreUnavailableError, match="no default process group"):
        SharedValue().update(one_more)
    with pytest.raises(StoreUnavailableError):
        default_store()
