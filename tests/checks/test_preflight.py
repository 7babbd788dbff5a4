"""What every start looks for before any work."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_trainer import (
    BatchConfig,
    ConfigError,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
    RuntimeConfig,
    ScheduleConfig,
    TrainerConfig,
)
from accel_trainer.checks.preflight import refuse_launch
from accel_trainer.run.session import find_warnings

from .. import processes, workload


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that lets torch and the launcher say what they would on another machine."""

    def pretend_it(
        *,
        num_processes: int = 1,
        num_gpus: int = 0,
        is_mac: bool = False,
        has_nccl: bool = True,
        uses_cpu: bool = False,
    ) -> None:
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, "0")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "29500")
        monkeypatch.setenv("WORLD_SIZE", str(num_processes))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_processes))
        monkeypatch.setenv("ACCELERATE_USE_CPU", str(uses_cpu))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: is_mac)
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: has_nccl)

    return pretend_it


def warning(
    code: str, config: RecipeConfig | None = None, *, is_too_late_for_cublas: bool = False
) -> str | None:
    found = find_warnings(config or RecipeConfig(), is_too_late_for_cublas=is_too_late_for_cublas)
    return found.get(code)


def test_several_processes_on_the_one_gpu_of_a_mac_are_refused(
    pretend: Callable[..., None],
) -> None:
    pretend(num_processes=4, is_mac=True)
    with pytest.raises(ConfigError, match="4 processes cannot share the GPU of a Mac: launch one"):
        refuse_launch(RuntimeConfig())
    for works in (
        {"num_processes": 4, "is_mac": True, "uses_cpu": True},
        {"is_mac": True},
        {"num_processes": 4},
    ):
        pretend(**works)
        refuse_launch(RuntimeConfig())


def test_several_gpus_without_nccl_are_refused(pretend: Callable[..., None]) -> None:
    without = {"num_processes": 4, "num_gpus": 4, "has_nccl": False}
    pretend(**without)
    with pytest.raises(ConfigError, match="this torch .* has no NCCL"):
        refuse_launch(RuntimeConfig())
    refuse_launch(RuntimeConfig(backend="gloo"))
    for change in ({"has_nccl": True}, {"num_gpus": 0}, {"num_processes": 1}, {"uses_cpu": True}):
        pretend(**{**without, **change})
        refuse_launch(RuntimeConfig())


def test_gpus_without_a_process_are_named_with_the_launch_that_uses_them(
    pretend: Callable[..., None],
) -> None:
    pretend(num_gpus=8)
    assert "`accelerate launch --multi_gpu --num_processes 8 RECIPE`" in str(warning("IDLE_GPUS"))
    for used in (
        {"num_gpus": 4, "num_processes": 4},
        {"num_gpus": 0},
        {"num_gpus": 8, "uses_cpu": True},
    ):
        pretend(**used)
        assert warning("IDLE_GPUS") is None


@pytest.mark.parametrize(
    ("optimizer", "schedule", "said"),
    [
        (
            {},
            {},
            "4 times --optimizer.base-batch-size 256 and --lr 0.1 is not scaled: set --optimizer."
            "learning-rate-scaling linear, or --optimizer.base-batch-size 1024 if",
        ),
        ({"name": "adamw"}, {}, "set --optimizer.learning-rate-scaling sqrt"),
        (
            {"learning_rate_scaling": "linear"},
            {},
            "starts at its peak: set --schedule.warmup-epochs",
        ),
        ({"learning_rate_scaling": "linear"}, {"warmup_epochs": 5}, None),
        ({"learning_rate_scaling": "linear"}, {"shape": "triangular"}, None),
        ({"base_batch_size": 257}, {}, None),
    ],
)
def test_an_unscaled_learning_rate_with_many_processes_is_reported(
    pretend: Callable[..., None],
    optimizer: dict[str, Any],
    schedule: dict[str, Any],
    said: str | None,
) -> None:
    pretend(num_processes=4)
    config = RecipeConfig(
        batch=BatchConfig(per_device_batch_size=256),
        optimizer=OptimizerConfig(**optimizer),
        schedule=ScheduleConfig(**schedule),
    )
    found = warning("LEARNING_RATE", config)
    assert (found is None) == (said is None)
    assert said is None or said in str(found)
    large = replace(config, batch=BatchConfig(per_device_batch_size=1024))
    pretend(num_processes=1)
    assert warning("LEARNING_RATE", large) is None, "one process: the batch is what was asked for"


def test_a_start_warns_once_on_the_main_process(tmp_path: Path) -> None:
    job = processes.run(
        train_a_large_batch, tmp_path / "run", num_processes=2, folder=tmp_path / "logs"
    )
    assert job.output(0).count("[LEARNING_RATE] the global batch 32 is 4 times ") == 1
    assert job.output(1) == ""


def train_a_large_batch(folder: Path) -> None:
    config = workload.make_config(folder)
    optimizer = replace(config.optimizer, base_batch_size=8)
    workload.train(
        replace(config, optimizer=optimizer, trainer=replace(config.trainer, max_steps=1))
    )


def test_a_start_that_cannot_work_is_refused_before_the_processes_join(tmp_path: Path) -> None:
    processes.run(train_on_a_mac, tmp_path / "run", num_processes=2, folder=tmp_path / "logs")
    assert not (tmp_path / "run").exists()


def train_on_a_mac(folder: Path) -> None:
    torch.backends.mps.is_available = lambda: True  # type: ignore[method-assign]
    os.environ["ACCELERATE_USE_CPU"] = "false"
    with pytest.raises(ConfigError, match="2 processes cannot share the GPU of a Mac"):
        workload.train(workload.make_config(folder))
    assert not torch.distributed.is_initialized()


def test_cuda_in_use_before_the_run_without_a_workspace_of_cublas(
    pretend: Callable[..., None],
) -> None:
    pretend(num_gpus=1)
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in str(
        warning("CUBLAS_LATE", is_too_late_for_cublas=True)
    )
    assert warning("CUBLAS_LATE") is None
    careless = RecipeConfig(runtime=RuntimeConfig(deterministic=False))
    assert warning("CUBLAS_LATE", careless, is_too_late_for_cublas=True) is None


def test_a_run_that_trains_nothing_says_whose_weights_it_exports() -> None:
    untrained = RecipeConfig(trainer=TrainerConfig(num_epochs=0))
    assert "--epochs 0" in str(warning("UNTRAINED", untrained))
    assert warning("UNTRAINED") is None
    given = replace(untrained, run=RunConfig(init_from=Path("weights.safetensors")))
    assert warning("UNTRAINED", given) is None
