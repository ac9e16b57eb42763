"""What the benchmark of long queues counts."""

from __future__ import annotations

import subprocess

import psutil

from benchmarks.long_queue.run import at_one_time


def test_a_process_that_ended_while_the_others_were_looked_for_is_not_counted() -> None:
    ended = subprocess.Popen(["true"])
    found = [psutil.Process(ended.pid), psutil.Process()]
    ended.wait()
    assert at_one_time(found) == [psutil.Process()]
