"""``gpuslice run --lazy-resume`` end to end."""

from __future__ import annotations

import json

import pytest

from .conftest import Workshop

TRAIN = """
import hashlib, sys, threading
import torch
from torch.utils.data import DataLoader, TensorDataset

if "broken" in sys.argv:
    from gpuslice.errors import CorruptSnapshotError
    from gpuslice.kernels.host.device import CpuDevice
    copy_in = CpuDevice.copy_in
    def broken(*arguments):
        if threading.current_thread().name == "gpuslice-lazy":
            raise CorruptSnapshotError("storage 7 is damaged")
        return copy_in(*arguments)
    CpuDevice.copy_in = broken

def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Dropout(0.2), torch.nn.Linear(200, 200))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(32, 200), torch.randn(32, 200))
    for epoch in range(2):
        for number, (x, y) in enumerate(DataLoader(data, batch_size=8, shuffle=True, num_workers=epoch)):
            torch.nn.functional.mse_loss(model(x), y).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        digest = hashlib.sha256()
        moments = [moment for slots in optimizer.state.values() for moment in slots.values()]
        for value in [*model.parameters(), *moments]:
            digest.update(value.detach().numpy().tobytes())
        del moments, value  # or they could be reached by these names, too
        print(digest.hexdigest())

try:
    main()
finally:
    print("the script's own end")
"""
#: The two moments of the two matrices.
LATER_BYTES = 2 * 2 * 200 * 200 * 4


@pytest.fixture
def workshop(warm_workshop: Workshop) -> Workshop:
    return warm_workshop


def test_a_lazy_resume_at_every_boundary_changes_no_bit(workshop: Workshop) -> None:
    workshop.write("train.py", TRAIN)
    plain = workshop.python("train.py")
    words = ("--lazy-resume", "--suspend-every", "1", "--report", "r.json")
    ours = workshop.gpuslice_run(*words, "train.py")
    assert (ours.returncode, ours.stdout) == (0, plain.stdout), ours.stderr
    report = json.loads((workshop.directory / "r.json").read_text())
    later = {switch["boundary"]: switch["bytes_later"] for switch in report["switches"]}
    assert [later[boundary] for boundary in (3, 4, 5)] == [LATER_BYTES] * 3
    assert [later[1], later[2]] == [0, 0]  # there is no optimizer state yet
    assert all((switch["stream_s"] > 0) == (switch["bytes_later"] > 0) for switch in report["switches"])


def test_nothing_comes_later_unless_it_is_asked_for(workshop: Workshop) -> None:
    workshop.write("train.py", TRAIN)
    ours = workshop.gpuslice_run("--suspend-every", "1", "--report", "r.json", "train.py")
    assert ours.returncode == 0, ours.stderr
    report = json.loads((workshop.directory / "r.json").read_text())
    assert not any(switch["bytes_later"] for switch in report["switches"])


def test_a_script_whose_state_does_not_come_ends_at_once(workshop: Workshop) -> None:
    workshop.write("train.py", TRAIN)
    ours = workshop.gpuslice_run("--lazy-resume", "--suspend-every", "1", "train.py", "broken")
    assert (ours.returncode, ours.stdout) == (4, "")
    what = "the process ends without its job's state, whose snapshots are kept"
    assert ours.stderr == f"gpuslice: {what}: storage 7 is damaged\n"
