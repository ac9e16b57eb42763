"""A trainer as Ray has it, without Ray: whose workers are the job's ranks."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import pytest

from gpuslice.hooks import ray_trainer

FORMER = "ray.train.torch.torch_trainer"


@dataclasses.dataclass
class ScalingConfig:
    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False


class Trainer:
    def __init__(
        self, function: object, *, scaling_config: ScalingConfig | None = None, name: str = ""
    ) -> None:
        self.function, self.scaling_config, self.name = function, scaling_config, name


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The changed trainer; ``sys.modules`` has it under both names."""
    for name in (ray_trainer.MODULE, FORMER):
        module: Any = ModuleType(name)
        module.TorchTrainer = type("TorchTrainer", (Trainer,), {"__init__": Trainer.__init__})
        module.ScalingConfig, module.LocalTorchController = ScalingConfig, object
        monkeypatch.setitem(sys.modules, name, module)
        ray_trainer.install(name)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    return sys.modules[ray_trainer.MODULE]


@pytest.mark.parametrize("workers", [2, (1, 4), 0])
def test_the_ranks_are_its_workers(made: Any, workers: int | tuple[int, int]) -> None:
    trainer = made.TorchTrainer(print, scaling_config=ScalingConfig(workers, use_gpu=True), name="n")
    assert trainer.scaling_config == ScalingConfig(0, use_gpu=True)
    assert (trainer.function, trainer.name) == (print, "n")


def test_a_single_rank_is_the_worker_that_there_is_by_default(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("RANK")
    assert made.TorchTrainer(print).scaling_config == ScalingConfig(0)


@pytest.mark.parametrize(
    ("workers", "said"), [(3, "has 3 workers"), (1, "has 1 worker,"), ((3, 4), "3 to 4")]
)
def test_another_number_of_workers_is_refused(
    made: Any, capsys: pytest.CaptureFixture[str], workers: int | tuple[int, int], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        made.TorchTrainer(print, scaling_config=ScalingConfig(workers))
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", [ray_trainer.MODULE, FORMER])
def test_a_ray_without_local_mode_is_refused(
    made: Any, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    del made.LocalTorchController
    with pytest.raises(SystemExit) as ended:
        sys.modules[name].TorchTrainer(print)
    assert ended.value.code == 3
    assert "install Ray 2.60" in capsys.readouterr().err
