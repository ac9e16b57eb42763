"""A suspended job's tensors are touched by scripts: an exception of Python, and the process lives on."""

from __future__ import annotations

import json

import pytest

from .conftest import Workshop

TOUCH = """
import json, threading, time
import gpuslice, torch

model = torch.nn.Linear(256, 256)
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(2, 256)).sum().backward()
optimizer.step()
job = gpuslice.attach(model=model, optimizer=optimizer)
before = float(model.weight.sum())
stop, seen = threading.Event(), set()


def watch():
    while not stop.is_set():
        try:
            seen.add(float(model.weight.detach().sum()))
        except gpuslice.TensorParkedError:
            seen.add("parked")


def seen_now(kind):
    # Wait until the watcher has looked, and has found this.
    seen.discard(kind)
    while kind not in seen:
        time.sleep(0.001)


def told(touch):
    said = []

    def run():
        try:
            touch()
            said.append("nothing")
        except Exception as error:
            said.append(type(error).__name__)

    run()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return said


watcher = threading.Thread(target=watch)
watcher.start()
found = {}
for _ in range(3):
    seen_now(before)
    job.suspend()
    found = {
        "sum": told(lambda: model.weight.sum()),
        "repr": told(lambda: repr(model.weight)),
        "item": told(lambda: model.bias[0].item()),
        "step": told(optimizer.step),
    }
    seen_now("parked")
    job.resume()
seen_now(before)
stop.set()
watcher.join()
print(json.dumps({"found": found, "seen": sorted(map(str, seen)), "before": str(before)}))
"""


@pytest.mark.parametrize("launched", [False, True], ids=["python", "gpuslice run"])
def test_no_thread_of_a_script_reads_what_is_not_there(warm_workshop: Workshop, launched: bool) -> None:
    """One thread reads a weight all the while: it sees the weight, or is told that it is away."""
    script = str(warm_workshop.write("touch.py", TOUCH))
    done = (warm_workshop.gpuslice_run if launched else warm_workshop.python)(script)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["found"] == dict.fromkeys(("sum", "repr", "item", "step"), ["TensorParkedError"] * 2)
    assert result["seen"] == sorted(["parked", result["before"]])
