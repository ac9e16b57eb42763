"""Scripts for which gpuslice starts the ranks, found by their source."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuslice.errors import UsageError
from gpuslice.launch.rank_start import as_ranks, find_rank_use, is_told_ranks, with_ranks

EXPECTS = "import os\nrank = int(os.environ['LOCAL_RANK'])\n"
JOINS = "import torch.distributed as dist\n\ndist.init_process_group('gloo')\n"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (EXPECTS, 2),
        (JOINS, 3),
        ("from torch.distributed import init_process_group as join\nx = os.getenv('RANK')\n", 2),
        ("mesh = init_device_mesh('cuda', (2,))", 1),
        ("import torch\nmodel = torch.nn.Linear(1, 1)\n", 0),
        (JOINS + "import torch.multiprocessing as mp\nmp.spawn(train, nprocs=2)\n", 0),
        (JOINS + "from multiprocessing import Process\n", 0),
        (JOINS + "import lightning as L\n", 0),
        (JOINS + "from pytorch_lightning.loggers import CSVLogger\n", 0),
        (EXPECTS + "subprocess.Popen(others)\n", 0),
        ("from ray.train.torch import TorchTrainer\nTorchTrainer(train).fit()\n", 2),
        ("import ray.train.torch\n\nray.train.torch.TorchTrainer(train).fit()\n", 3),
        (JOINS + "import ray\n", 0),
        ("from mine import TorchTrainer\nTorchTrainer(train).fit()\n", 0),
        ("dist.init_process_group(", 0),
    ],
)
def test_a_script_says_whether_it_expects_a_launcher(tmp_path: Path, source: str, line: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    assert find_rank_use([str(script), "--lr", "1"]) == (f"train.py:{line}" if line else "")


def test_what_torchrun_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("from engine import fit\n")
    (tmp_path / "engine.py").write_text(JOINS)
    assert with_ranks(["train.py", "-m", "x"], 2) == [*TORCHRUN, "train.py", "-m", "x"]
    assert "engine.py:3 takes its rank from its launcher, so 2 ranks are started" in capsys.readouterr().err
    assert with_ranks(["-m", "train", "x"], 2) == [*TORCHRUN, "--module", "train", "x"]
    capsys.readouterr()
    for words, ranks in ((["train.py"], 1), (["--", "python", "train.py"], 2), (["gone.py"], 2), ([], 2)):
        assert with_ranks(words, ranks) == words
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("torchrun", [["torchrun"], ["/bin/torchrun"], ["python", *TORCHRUN[:2]]])
def test_torchrun_without_a_number_of_ranks_can_be_told_one(torchrun: list[str]) -> None:
    for options in ([], ["--standalone"], ["--nnodes", "1"], ["--nnodes=1:1"]):
        assert is_told_ranks(["--", *torchrun, *options, "train.py"], 4)
    assert not is_told_ranks(["--", *torchrun, "--nproc_per_node=4", "train.py"], 4)
    with pytest.raises(UsageError, match="to start 2 ranks, and the job may have up to 4"):
        is_told_ranks(["--", *torchrun, "--nproc-per-node", "2", "train.py"], 4)
    with pytest.raises(UsageError, match="several nodes"):
        is_told_ranks(["--", *torchrun, "--nnodes=1:4", "train.py"], 4)


def test_other_commands_cannot() -> None:
    for words in (["train.py"], ["--", "python", "train.py"], ["-m", "train"], []):
        assert not is_told_ranks(words, 4)


def test_a_script_that_grows_is_started_as_many_ranks() -> None:
    started = as_ranks(["-m", "train", "--lr", "1"], 4)
    assert started[:2] == ["-m", "torch.distributed.run"]
    assert started[-6:] == ["--nproc-per-node", "4", "--module", "train", "--lr", "1"]
    own = ["--", "torchrun", "--nproc-per-node", "4", "train.py"]
    assert as_ranks(own, 4) == own
