"""``gpuslice run`` on real scripts: nothing but the suspends tells it from plain python."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from ..patience import PATIENCE_S
from .conftest import Workshop

#: Dropout, batch norm, accumulation, workers that stay, a scheduler, and an EMA kept by a background thread.
TRAIN = """
import hashlib, queue, sys, threading
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def updater(work, done, ema, model):
    while work.get():
        with torch.no_grad():
            for name, value in model.state_dict().items():
                ema[name] = ema[name] * 0.9 + value * 0.1
        done.put(True)

def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 256), nn.BatchNorm1d(256), nn.Dropout(0.2), nn.Linear(256, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    data = TensorDataset(torch.randn(64, 20), torch.randint(0, 3, (64,)))
    loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)
    ema = {name: value.clone().float() for name, value in model.state_dict().items()}
    work, done = queue.Queue(), queue.Queue()
    threading.Thread(target=updater, args=(work, done, ema, model), daemon=True).start()
    for epoch in range(3):
        for number, (x, y) in enumerate(loader):
            (nn.functional.cross_entropy(model(x), y) / 2).backward()
            if number % 2:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            work.put(True)
            done.get()
    digest = hashlib.sha256()
    for state in (model.state_dict(), ema):
        for value in state.values():
            digest.update(value.numpy().tobytes())
    print(digest.hexdigest())

if __name__ == "__main__":
    main()
"""


def test_a_suspend_at_every_boundary_changes_no_bit(warm_workshop: Workshop) -> None:
    warm_workshop.write("train.py", TRAIN)
    plain = warm_workshop.python("train.py")
    ours = warm_workshop.gpuslice_run("--suspend-every", "1", "--report", "r.json", "train.py")
    assert (ours.returncode, ours.stdout) == (0, plain.stdout), ours.stderr
    report = json.loads((warm_workshop.directory / "r.json").read_text())
    assert [switch["boundary"] for switch in report["switches"]] == list(range(1, 3 * 9 + 1))
    assert report["totals"]["steps"] == 12
    assert all(switch["bytes_freed"] > 60_000 for switch in report["switches"][4:])
    assert ours.stderr.splitlines()[-1].startswith("gpuslice: 27 switches at 27 boundaries")


PROBE = """
import sys
print(__name__, sys.argv, sys.path[0], __file__, "site" "customize" in sys.modules)
print("to stderr", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["sub/probe.py", "a", "--device", "x", "--", "b"],
        ["-m", "sub.probe", "a", "--job", "x"],
    ],
)
def test_a_script_sees_what_plain_python_shows_it(workshop: Workshop, words: list[str]) -> None:
    workshop.write("sub/probe.py", PROBE)
    plain, ours = workshop.python(*words), workshop.gpuslice_run(*words)
    assert plain.returncode == 7
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_a_command_is_run_as_it_is(workshop: Workshop) -> None:
    ours = workshop.gpuslice_run("--", "sh", "-c", "echo out; echo err >&2; exit 9")
    assert (ours.returncode, ours.stdout, ours.stderr) == (9, "out\n", "err\n")


FAILING = """
import torch
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise ValueError("bad sample")
        return torch.tensor([float(index)])

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(Data()):
    model(x).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_an_exception_shows_the_user_s_own_traceback(
    quick_workshop: Workshop, others_lines: Callable[[str], str]
) -> None:
    quick_workshop.write("failing.py", FAILING)
    plain = quick_workshop.python("failing.py")
    ours = quick_workshop.gpuslice_run("--suspend-at", "2,3", "--report", "r.json", "failing.py")
    assert "ValueError: bad sample" in plain.stderr
    assert (ours.returncode, others_lines(ours.stderr)) == (1, plain.stderr)
    report = json.loads((quick_workshop.directory / "r.json").read_text())
    assert [switch["boundary"] for switch in report["switches"]] == [2, 3]


ENDLESS = """
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    print("started", flush=True)
    while True:
        for (x,) in DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4):
            model(x).sum().backward()
            optimizer.step()
finally:
    print("sum", model.weight.sum().item() is not None)
"""


@pytest.mark.parametrize(
    ("signum", "stdout"), [(signal.SIGINT, "sum True\n"), (signal.SIGTERM, "")], ids=["SIGINT", "SIGTERM"]
)
def test_signals_act_as_ever_amid_suspends(
    warm_workshop: Workshop, signum: signal.Signals, stdout: str
) -> None:
    warm_workshop.write("endless.py", ENDLESS)
    command = warm_workshop.command("--suspend-every", "1", "endless.py")
    process = warm_workshop.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signum)
        out, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out) == (-signum, stdout)


def test_a_full_ram_disk_ends_the_job_with_its_state_whole(warm_workshop: Workshop) -> None:
    warm_workshop.write("endless.py", ENDLESS)
    done = warm_workshop.gpuslice_run("--suspend-at", "3", "--ramdisk-limit", "1k", "endless.py")
    assert (done.returncode, done.stdout) == (5, "started\nsum True\n")
    what, remedy, summary = done.stderr.splitlines()
    assert "RAM disk" in what
    assert "--ramdisk-limit" in remedy
    assert "no switch at 3 boundaries" in summary


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["--suspend-every", "x", "probe.py"], 2, "--suspend-every"),
        (["--suspend-every", "1", "--suspend-at", "3", "probe.py"], 2, "--suspend-at"),
        (["--ramdisk-limit", "4Q", "probe.py"], 2, "'4Q'"),
        (["--device"], 2, "--device"),
        (["nowhere.py"], 2, "nowhere.py"),
        (["--device", "cpu:77", "torch.py"], 3, "cpu:77"),
        (["--device", "cpu:77", "probe.py"], 3, "cpu:77"),
    ],
)
def test_mistakes_are_named_in_two_lines(workshop: Workshop, words: list[str], code: int, named: str) -> None:
    workshop.write("probe.py", PROBE)
    workshop.write("script.py", "import torch\n")
    words = ["script.py" if word == "torch.py" else word for word in words]
    done = workshop.gpuslice_run(*words)
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (code, "")
    assert named in lines[0]
    assert len(lines) <= 2
    assert all(line.startswith("gpuslice: ") for line in lines)


DISTRIBUTED = """
import hashlib
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()

def train():
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(20, 3), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(rank)
    data = TensorDataset(torch.randn(64, 20), torch.randint(0, 3, (64,)))
    for x, y in DataLoader(data, batch_size=8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return hashlib.sha256(model.module.weight.detach().numpy().tobytes()).hexdigest()

plain, suspended = train(), train()
open(f"digests.{rank}", "w").write(f"{plain} {suspended}")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_ranks_of_torchrun_are_suspended_each_with_its_report(quick_workshop: Workshop) -> None:
    quick_workshop.write("ddp.py", DISTRIBUTED)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "ddp.py"]
    flags = ["--suspend-at", "11,12,15,18", "--report", "r.json"]
    done = quick_workshop.gpuslice_run(*flags, "--", *launcher)
    assert done.returncode == 0, done.stderr
    digests = [(quick_workshop.directory / f"digests.{rank}").read_text().split() for rank in (0, 1)]
    assert {digest for pair in digests for digest in pair} == {digests[0][0]}
    for rank, name in enumerate(["r.json", "r.rank1.json"]):
        report = json.loads((quick_workshop.directory / name).read_text())
        assert report["rank"] == rank
        assert [switch["boundary"] for switch in report["switches"]] == [11, 12, 15, 18]


SHORT = """
import hashlib, os, sys
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for x in torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=4):
    model(x).sum().backward()
    optimizer.step()
digest = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
numbers = sorted(int(name) for name in os.listdir("/proc/self/fd"))
files = {os.readlink(f"/proc/self/fd/{number}") for number in numbers[:-1] if number < 3}
with open(sys.argv[1], "w") as out:
    print(digest, *(stream is None for stream in (sys.stdin, sys.stdout, sys.stderr)), file=out)
    print(files <= {os.devnull}, file=out)
print("nobody hears this")
"""


@pytest.mark.slow
def test_closed_streams_are_as_with_python_and_no_file_of_ours_takes_their_place(
    quick_workshop: Workshop,
) -> None:
    quick_workshop.write("short.py", SHORT)
    ours = quick_workshop.command("--suspend-every", "1", "--report", "r.json", "short.py", "ours")
    for words in ([sys.executable, "short.py", "plain"], ours):
        assert quick_workshop.execute(["bash", "-c", '"$@" <&- >&- 2>&-', "-", *words]).returncode == 0
    plain, ours_said = ((quick_workshop.directory / name).read_text() for name in ("plain", "ours"))
    assert plain.endswith(" True True True\nTrue\n")
    assert ours_said == plain
    assert json.loads((quick_workshop.directory / "r.json").read_text())["totals"]["steps"] == 3


STREAMS = """
import os, sys
for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
    try:
        os.fstat(number)
    except OSError as error:
        open(sys.argv[1], "a").write(f"{number} {error} {stream}; ")
sys.exit(7)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", ">&- 2>&-"])
def test_a_closed_stream_is_closed_to_the_command(quick_workshop: Workshop, closed: str) -> None:
    quick_workshop.write("streams.py", STREAMS)
    for words in ([sys.executable, "streams.py", "plain"], quick_workshop.command("streams.py", "ours")):
        assert quick_workshop.execute(["bash", "-c", f'"$@" {closed}', "-", *words]).returncode == 7
    plain, ours = ((quick_workshop.directory / name).read_text() for name in ("plain", "ours"))
    assert ours == plain != ""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_line_that_is_wrong_says_so_where_it_can(quick_workshop: Workshop, closed: str) -> None:
    for words in (["ps", "--state-dir", "nowhere"], ["run", "missing.py"], ["up", "--devices", "gpu"]):
        command = ["bash", "-c", f'"$@" {closed}', "-", sys.executable, "-m", "gpuslice", *words]
        ended = quick_workshop.execute(command)
        assert ended.returncode in (2, 3)
        assert "Traceback" not in ended.stdout + ended.stderr
