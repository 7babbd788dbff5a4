"""What every start looks for before any work."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accel_trainer import BatchConfig, ConfigError, OptimizerConfig, RecipeConfig, RuntimeConfig, ScheduleConfig
from accel_trainer.run.preflight import CHECKS, LaunchContext

from .. import processes, workload

FOUR = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}


def find(code: str, config: RecipeConfig | None = None, **facts: object) -> str | None:
    check = next(check for check in CHECKS if check.code == code)
    facts = {"environ": {}} | facts
    return check.run(LaunchContext(config=config or RecipeConfig(), **facts))


def test_several_processes_on_the_one_gpu_of_a_mac_are_refused() -> None:
    found = find("MPS_PROCESSES", has_mps=True, environ=FOUR)
    assert found is not None
    assert found.startswith("4 processes cannot share the GPU of a Mac: launch one with `python`")
    assert find("MPS_PROCESSES", has_mps=True, environ=FOUR | {"ACCELERATE_USE_CPU": "true"}) is None
    assert find("MPS_PROCESSES", has_mps=True) is None
    assert find("MPS_PROCESSES", has_mps=False, environ=FOUR) is None


def test_several_gpus_without_nccl_are_refused() -> None:
    found = find("NCCL_MISSING", has_nccl=False, num_gpus=4, environ=FOUR)
    assert found is not None
    assert f"this torch {torch.__version__} has no NCCL: install torch for CUDA on Linux" in found
    assert find("NCCL_MISSING", has_nccl=True, num_gpus=4, environ=FOUR) is None
    assert find("NCCL_MISSING", has_nccl=False, num_gpus=0, environ=FOUR) is None
    assert find("NCCL_MISSING", has_nccl=False, num_gpus=4) is None
    on_cpu = FOUR | {"ACCELERATE_USE_CPU": "true"}
    assert find("NCCL_MISSING", has_nccl=False, num_gpus=4, environ=on_cpu) is None
    by_gloo = RecipeConfig(runtime=RuntimeConfig(backend="gloo"))
    assert find("NCCL_MISSING", by_gloo, has_nccl=False, num_gpus=4, environ=FOUR) is None


def test_gpus_without_a_process_are_reported_with_a_launch_that_uses_them() -> None:
    found = find("IDLE_GPUS", num_gpus=8)
    assert found is not None
    assert "`accelerate launch --multi_gpu --num_processes 8 RECIPE`" in found
    assert find("IDLE_GPUS", num_gpus=4, environ=FOUR) is None
    assert find("IDLE_GPUS", num_gpus=0) is None
    assert find("IDLE_GPUS", num_gpus=8, environ={"ACCELERATE_USE_CPU": "true"}) is None


@pytest.mark.parametrize(
    ("optimizer", "schedule", "said"),
    [
        ({}, {}, "4 times --optimizer.base-batch-size 256 and --lr 0.1 is not scaled: set --optimizer."
                 "learning-rate-scaling linear, or --optimizer.base-batch-size 1024 if"),
        ({"name": "adamw"}, {}, "set --optimizer.learning-rate-scaling sqrt"),
        ({"learning_rate_scaling": "linear"}, {}, "starts at its peak: set --schedule.warmup-epochs"),
        ({"learning_rate_scaling": "linear"}, {"warmup_epochs": 5}, None),
        ({"learning_rate_scaling": "linear"}, {"shape": "triangular"}, None),
        ({"base_batch_size": 257}, {}, None),
    ],
)  # fmt: skip
def test_an_unscaled_learning_rate_with_many_processes_is_reported(
    optimizer: dict[str, object], schedule: dict[str, object], said: str | None
) -> None:
    config = RecipeConfig(
        batch=BatchConfig(per_device_batch_size=256),
        optimizer=OptimizerConfig(**optimizer),
        schedule=ScheduleConfig(**schedule),
    )
    found = find("LEARNING_RATE", config, environ=FOUR)
    assert (found is None) == (said is None)
    assert said is None or said in str(found)
    large = replace(config, batch=BatchConfig(per_device_batch_size=1024))
    assert find("LEARNING_RATE", large) is None, "one process: the batch is what was asked for"


def test_a_start_warns_once_on_the_main_process(tmp_path: Path) -> None:
    job = processes.run(train_a_large_batch, tmp_path / "run", num_processes=2, folder=tmp_path / "logs")
    warning = "[LEARNING_RATE] the global batch 32 is 4 times --optimizer.base-batch-size 8 and --lr 0.05"
    assert job.output(0).count(warning) == 1
    assert job.output(1) == ""


def train_a_large_batch(folder: Path) -> None:
    config = workload.make_config(folder)
    optimizer = replace(config.optimizer, base_batch_size=8)
    workload.train(replace(config, optimizer=optimizer, trainer=replace(config.trainer, max_steps=1)))


def test_a_start_that_cannot_work_is_refused_before_the_processes_join(tmp_path: Path) -> None:
    job = processes.start(train_on_a_mac, tmp_path / "run", num_processes=2, folder=tmp_path / "logs")
    assert job.wait() == [0, 0]
    assert not (tmp_path / "run").exists()


def train_on_a_mac(folder: Path) -> None:
    torch.backends.mps.is_available = lambda: True  # type: ignore[method-assign]
    os.environ["ACCELERATE_USE_CPU"] = "false"
    with pytest.raises(ConfigError, match="2 processes cannot share the GPU of a Mac"):
        workload.train(workload.make_config(folder))
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.13.1", "2.15.0+cu132"])
def test_a_version_of_torch_that_the_tests_ran_with_is_no_surprise(version: str) -> None:
    assert find("TORCH_UNTRIED", torch_version=version) is None


@pytest.mark.parametrize("version", ["2.7.1", "2.1.2", "2.80.0", "2.99.0", "3.0.0a0+git1"])
def test_a_version_of_torch_that_was_never_tried_is_said(version: str) -> None:
    said = find("TORCH_UNTRIED", torch_version=version)
    assert said is not None
    assert said.startswith(f"torch {version} has not been tried: the tests ran with 2.13, ")


def test_cuda_in_use_before_the_run_without_a_workspace_of_cublas() -> None:
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in str(find("CUBLAS_LATE", is_too_late_for_cublas=True))
    assert find("CUBLAS_LATE", is_too_late_for_cublas=False) is None
    careless = RecipeConfig(runtime=RuntimeConfig(deterministic=False))
    assert find("CUBLAS_LATE", careless, is_too_late_for_cublas=True) is None


def test_float32_without_tf32_on_a_gpu_with_tensor_cores() -> None:
    ampere = {"num_gpus": 1, "gpu_capability": lambda: (8, 0), "environ": {}}
    assert "--mixed-precision bf16, or --runtime.tf32" in str(find("TENSOR_CORES", **ampere))
    for runtime in (RuntimeConfig(tf32=True), RuntimeConfig(mixed_precision="bf16")):
        assert find("TENSOR_CORES", RecipeConfig(runtime=runtime), **ampere) is None
    for other in ({"gpu_capability": lambda: (7, 5)}, {"num_gpus": 0}, {"environ": {"ACCELERATE_USE_CPU": "true"}}):
        assert find("TENSOR_CORES", **{**ampere, **other}) is None
    assert find("TENSOR_CORES", **{**ampere, "environ": {"ACCELERATE_MIXED_PRECISION": "fp16"}}) is None
