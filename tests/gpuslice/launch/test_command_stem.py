"""A job is named after its script, whatever starts that."""

from __future__ import annotations

import pytest

from gpuslice.launch.command_stem import stem


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["runs/train.py", "--epochs", "3"], "train"),
        (["-m", "pkg.fit"], "fit"),
        (["-m", "pkg.__main__"], "pkg"),
        (["tool/__main__.py"], "tool"),
        (["--", "python", "x.py"], "x"),
        (["--", "/opt/venv/bin/python3.12", "-u", "-W", "ignore", "a/x.py", "other.py"], "x"),
        (["--", "python", "-m", "pkg.mod", "config.py"], "mod"),
        (["--", "python", "train"], "train"),
        (["--", "python", "-c", "import a"], "python"),
        (["--", "torchrun", "--standalone", "--nproc-per-node", "2", "train.py", "eval.py"], "train"),
        (["--", "torchrun", "-m", "pkg.fit"], "fit"),
        (["--", "python", "-m", "torch.distributed.run", "--nproc-per-node=2", "ddp.py"], "ddp"),
        (["--", "python", "-m", "torch.distributed.run", "--module", "pkg.fit"], "fit"),
        (["--", "accelerate", "launch", "sft.py", "--lr", "1"], "sft"),
        (["--", "env", "A=b", "python", "x.py"], "x"),
        (["--", "timeout", "-k", "3", "60", "python", "x.py"], "x"),
        (["--", "bash", "-c", "python a.py; python b.py"], "a"),
        (["--", "bash", "-lc", "cd /data && A=1 exec python -u fold.py --fold 0 > out"], "fold"),
        (["--", "sh", "-c", "until python train.py; do sleep 1; done"], "train"),
        (["--", "bash", "-c", 'for i in 1 2; do torchrun "my train.py"; done'], "my-train"),
        (["--", "bash", "-c", "cd x\nmake all"], "make"),
        (["--", "bash", "-c", "cd x"], "bash"),
        (["--", "bash", "-c", "'"], "job"),
        (["--", "bash", "run-all.sh", "fast"], "run-all"),
        (["--", "./run-all.sh"], "run-all"),
        (["--", "A=b"], "A-b"),
        (["--", "make", "train"], "make"),
        (["--", "../../…"], "job"),
        (["é" * 90 + ".py"], "job"),
    ],
)
def test_the_name(words: list[str], name: str) -> None:
    assert stem(words) == name
