"""Jobs of a scheduler on simulated GPUs, with the digests of undisturbed runs: turns, moves, gangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest

from gpuslice.client.client import Client
from gpuslice.verbs import JobInfo

from ..cli.conftest import Shell, shell_in
from ..cli.waiting import until
from ..patience import PATIENCE_S

#: Its file is the longest, so it begins first.
pytestmark = pytest.mark.slow
NOTHING: Mapping[str, str] = MappingProxyType({})
#: Batches of a job; after the 50th it goes slower and slower until there is the file ``ENOUGH``.
STEPS = 250
#: Digests of the script by its ranks.
_UNDISTURBED: dict[int, str] = {}
#: On whatever device its model is; says what it computed.
TRAIN = """
import hashlib, os, sys, time, torch
from torch.utils.data import DataLoader
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

steps, ranks = int(sys.argv[1]), int(os.environ.get("WORLD_SIZE", "1"))
named, made = "named" in sys.argv, 0
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
torch.manual_seed(1)
layers = torch.nn.Linear(64, 128), torch.nn.Dropout(0.1), torch.nn.Linear(128, 1)
model = torch.nn.Sequential(*layers).to(device)
trained = model
if ranks > 1:
    dist.init_process_group(os.environ.get("BACKEND", "gloo"))
    trained = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), fused=True)
for batch in DataLoader(torch.randn(4 * steps, 64), batch_size=4):
    here = device if named else model[0].weight.device
    loss = trained(batch.to(here, non_blocking=True) + 0.1 * torch.randn(4, 64, device=here)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    made += 1
    if made > 50 and not os.path.exists(os.environ["ENOUGH"]):
        time.sleep(0.05 * 2 ** ((made - 50) / 20))
digest = hashlib.sha256()
for value in model.state_dict().values():
    digest.update(value.cpu().numpy().tobytes())
if os.environ.get("RANK", "0") == "0":
    print(digest.hexdigest())
if ranks > 1:
    dist.destroy_process_group()
"""


class Site:
    """A scheduler with GPUs of its own, and the script."""

    def __init__(self, shell: Shell, directory: Path) -> None:
        self.shell = shell
        self.script = directory / "train.py"
        self.script.write_text(TRAIN, encoding="utf-8")
        self.account = str(directory / "account")
        self.enough = directory / "enough"
        self.environ = {**os.environ, "CUDASIM_ACCOUNT": self.account, "CUDASIM_DELAY_US": "20"}
        self.environ["ENOUGH"] = str(self.enough)

    def up(self, devices: str, *words: str) -> Client:
        with pytest.MonkeyPatch.context() as patch:
            for name in self.environ.keys() & {"CUDASIM_ACCOUNT", "CUDASIM_DEVICES"}:
                patch.setenv(name, self.environ[name])
            # On a real GPU, other tests are there, too.
            alone = () if "--foreign-grace" in words else ("--foreign", "ignore")
            self.shell("up", "--devices", devices, *alone, *words)
        return self.shell.client()

    def command(self, ranks: int, *more: str) -> list[str]:
        if ranks == 1:
            return [sys.executable, str(self.script), str(STEPS), *more]
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        return [*torchrun, str(self.script), str(STEPS), *more]

    def submit(self, client: Client, *more: str, ranks: int = 1, environ: Mapping[str, str] = NOTHING) -> str:
        words = ["--", *self.command(ranks, *more)]
        return client.submit(words, devices=ranks, environ={**self.environ, **environ}, max_restarts=1)

    def undisturbed(self, *, ranks: int = 1) -> str:
        """Computed once for all tests: what a script does before it trains changes no digest."""
        if ranks not in _UNDISTURBED:
            self.script.write_text(TRAIN, encoding="utf-8")
            environ = {**self.environ, "CUDASIM_ACCOUNT": f"{self.account}-alone"}
            done = subprocess.run(
                self.command(ranks),
                env=environ,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            _UNDISTURBED[ranks] = done.stdout.strip()
        return _UNDISTURBED[ranks]

    def end(self, client: Client, *jobs: str) -> list[JobInfo]:
        """Let jobs go fast; return how they ended, which must be well."""
        self.enough.touch()
        return [ended_well(client, job) for job in jobs]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with shell_in(tmp_path / "s") as shell:
        yield Site(shell, tmp_path)


def ended_well(client: Client, job: str) -> JobInfo:
    info = client.wait(job, PATIENCE_S)
    assert info is not None
    assert info.state == "succeeded", (info, Path(client.logs(job).err).read_text(encoding="utf-8"))
    return info


def digest(client: Client, job: str) -> str:
    return Path(client.logs(job).out).read_text(encoding="utf-8").strip().splitlines()[-1]


def have_taken_turns(client: Client, *jobs: str) -> None:
    for job in jobs:
        until(client, job, lambda info: info.suspends > 0)


def test_two_jobs_take_turns_on_one_gpu(site: Site) -> None:
    client = site.up("cuda:0", "--policy", "rr", "--quantum", "500ms", "--switch-share", "0")
    jobs = [site.submit(client) for _ in range(2)]
    have_taken_turns(client, *jobs)
    site.end(client, *jobs)
    assert {digest(client, job) for job in jobs} == {site.undisturbed()}
    site.shell("down")


@pytest.mark.two_gpus
def test_a_job_moves_to_another_gpu(site: Site) -> None:
    client = site.up("cuda:0,cuda:1", "--policy", "rr")
    job = site.submit(client)
    until(client, job, lambda info: info.steps > 5)
    (device,) = devices(client, job)
    site.shell("migrate", job, "--to", "cuda:1" if device == "cuda:0" else "cuda:0")
    until(client, job, lambda info: info.migrations == 1)
    site.end(client, job)
    assert digest(client, job) == site.undisturbed()
    site.shell("down")


@pytest.mark.two_gpus
def test_gangs_take_turns_on_two_gpus(site: Site, tmp_path: Path) -> None:
    """One by gloo and one by NCCL, whose groups are suspended and resumed."""
    client = site.up("cuda:0,cuda:1", "--policy", "rr", "--quantum", "500ms", "--switch-share", "0")
    by_nccl = {"BACKEND": "nccl", "CUDASIM_NCCL_LOG": str(tmp_path / "verbs")}
    jobs = [site.submit(client, ranks=2, environ=environ) for environ in (NOTHING, by_nccl)]
    have_taken_turns(client, *jobs)
    site.end(client, *jobs)
    assert {digest(client, job) for job in jobs} == {site.undisturbed(ranks=2)}
    for rank in range(2):
        verbs = (tmp_path / f"verbs.{rank}").read_text().split()
        assert verbs.count("suspend") == verbs.count("resume") > 0
    site.shell("down")


#: Takes memory of the first GPU until it is told to end.
COLLEAGUE = (
    "import sys, torch; held = torch.ones(1 << 20, device='cuda:0'); print(flush=True); sys.stdin.read()"
)


@pytest.mark.simulated
def test_a_job_parks_while_another_process_uses_its_gpu(site: Site) -> None:
    """Of two jobs, one goes to the GPU that is free; the processes of both are none of others."""
    client = site.up("cuda:0,cuda:1", "--policy", "rr", "--foreign-grace", "0s")
    jobs = [site.submit(client) for _ in range(2)]
    for job in jobs:
        until(client, job, lambda info: info.steps > 5)
    on_first = next(job for job in jobs if devices(client, job) == ("cuda:0",))
    words = [sys.executable, "-c", COLLEAGUE]
    with subprocess.Popen(
        words, env=site.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as colleague:
        until(client, on_first, lambda info: info.suspends > 0)
        first, second = client.status().devices
        assert ([user.pid for user in first.used_by], second.used_by) == ([colleague.pid], ())
        assert f"pid {colleague.pid} python" in site.shell("ps")
        colleague.communicate()
    site.end(client, *jobs)
    assert {digest(client, job) for job in jobs} == {site.undisturbed()}
    site.shell("down")


def test_a_killed_job_is_started_again_and_its_gpu_is_free(site: Site) -> None:
    client = site.up("cuda:0", "--policy", "rr")
    job = site.submit(client)
    until(client, job, lambda info: info.steps > 5)
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[-2:] == [str(site.script), str(STEPS)] and "gpuslice" not in words:
            process.send_signal(signal.SIGKILL)
    (ended,) = site.end(client, job)
    assert ended.restarts == 1
    assert digest(client, job) == site.undisturbed()
    site.shell("down")


@pytest.mark.two_gpus
def test_a_job_that_names_its_gpu_moves_there_and_back(site: Site) -> None:
    client = site.up("cuda:0,cuda:1", "--policy", "rr")
    job = site.submit(client, "named")
    until(client, job, lambda info: info.steps > 5)
    (first,) = devices(client, job)
    for device in ("cuda:1" if first == "cuda:0" else "cuda:0", first):
        site.shell("migrate", job, "--to", device)
        moved = until(
            client, job, lambda info, device=device: info.state == "running" and info.devices == (device,)
        )
        until(client, job, lambda info, steps=moved.steps: info.steps > steps + 5)
    (ended,) = site.end(client, job)
    assert ended.migrations == 2
    assert digest(client, job) == site.undisturbed()
    site.shell("down")


def devices(client: Client, job: str) -> tuple[str, ...]:
    return next(info for info in client.jobs() if info.id == job).devices


def are_suspended_once(site: Site, client: Client, *jobs: str) -> None:
    """Suspend and resume each job, and let all end."""
    for job in jobs:
        client.suspend(job)
        until(client, job, lambda info: info.state == "suspended")
        client.resume(job)
    assert [info.switches for info in site.end(client, *jobs)] == [1] * len(jobs)


@pytest.mark.two_gpus
@pytest.mark.parametrize("ranks", [1, 2])
def test_jobs_that_name_their_gpus_train_beside_each_other_on_those_that_they_have(
    site: Site, ranks: int
) -> None:
    gpus = [f"cuda:{number}" for number in range(2 * ranks)]
    site.environ["CUDASIM_DEVICES"] = str(len(gpus))
    client = site.up(",".join(gpus), "--policy", "fifo")
    jobs = [site.submit(client, "named", ranks=ranks) for _ in range(2)]
    for job in jobs:
        until(client, job, lambda info: info.steps > 5)
    assert sorted([*devices(client, jobs[0]), *devices(client, jobs[1])]) == gpus
    are_suspended_once(site, client, *jobs)
    assert {digest(client, job) for job in jobs} == {site.undisturbed(ranks=ranks)}
    site.shell("down")


@pytest.mark.two_gpus
@pytest.mark.parametrize("before", [True, False], ids=["before torch", "after torch"])
def test_what_a_script_shows_itself_is_the_gpu_that_it_has(site: Site, before: bool) -> None:
    setting = 'import os; os.environ["CUDA_VISIBLE_DEVICES"] = "0"\n'
    site.script.write_text(f"{setting}{TRAIN}" if before else f"import torch\n{setting}{TRAIN}")
    client = site.up("cuda:0,cuda:1", "--policy", "fifo")
    jobs = [site.submit(client, "named") for _ in range(2)]
    for job in jobs:
        until(client, job, lambda info: info.steps > 5)
    are_suspended_once(site, client, *jobs)
    assert {digest(client, job) for job in jobs} == {site.undisturbed()}
    site.shell("down")


@pytest.mark.two_gpus
def test_memory_on_a_gpu_without_a_lease_is_named(site: Site) -> None:
    site.script.write_text("import torch\nelsewhere = torch.ones(1 << 20, device='cuda:1')\n" + TRAIN)
    client = site.up("cuda:0,cuda:1", "--policy", "fifo")
    job = site.submit(client)
    info = until(client, job, lambda info: info.unleased is not None)
    (device,) = info.devices
    other = "cuda:1" if device == "cuda:0" else "cuda:0"
    assert info.unleased == f"4.00 MiB on {other}"
    assert f"4.00 MiB on {other} without a lease" in " ".join(site.shell("ps", "--wide").split())
    told = Path(client.logs(job).err).read_text(encoding="utf-8")
    assert told.count(f"the script holds 4.00 MiB on {other}, and its lease is of {device}") == 1
    client.cancel(job)
    client.wait(job, PATIENCE_S)
    site.shell("down")
