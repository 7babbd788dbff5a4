"""A norm over the samples of a forward never meets a single one after hours of training."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from accel_trainer import (
    BatchConfig,
    ClassificationTask,
    ConfigError,
    RecipeConfig,
    RunConfig,
    TrainerConfig,
    build_trainer,
    start_run,
)
from accel_trainer.checks.batch_norms import has_lone_sample, lone_samples_refused
from accel_trainer.core.batch_plan import BatchPlan
from accel_trainer.core.training_mode import evaluation_mode

from .. import processes


def of_vectors() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def of_pooled_pixels() -> nn.Module:
    """Normalises a single value of each channel, as the pooling branch of a segmenter does."""
    return nn.Sequential(
        nn.Unflatten(1, (6, 1, 1)), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(6, 3)
    )


def of_sequences() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(6, 3))


def frozen() -> nn.Module:
    return of_vectors().requires_grad_(False)


def in_evaluation() -> nn.Module:
    model = of_vectors()
    model[1].eval()  # type: ignore[index]
    return model


def without_norms() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))


MODELS: dict[Callable[[], nn.Module], bool] = {
    of_vectors: True,
    of_pooled_pixels: True,
    of_sequences: False,
    frozen: True,
    in_evaluation: False,
    without_norms: False,
}


def fails(model: nn.Module, plan: BatchPlan) -> bool:
    """Whether torch refuses to train on the micro-batches of an epoch of one process."""
    try:
        for step, index in itertools.product(
            range(plan.steps_per_epoch), range(plan.num_processes)
        ):
            for micro in plan.micro_batches(step, index):
                model(torch.randn(len(micro), 6))
    except ValueError as error:
        assert "more than 1 value per channel" in str(error)  # noqa: PT017
        return True
    return False


def test_what_torch_would_refuse_is_known_before_the_first_step() -> None:
    config = TrainerConfig(num_epochs=1)
    shapes = itertools.product(range(8, 14), (1, 2, 3, 4), (1, 2), (False, True))
    num_refused = 0
    for num_samples, micro, num_processes, drop_last in shapes:
        plan = BatchPlan(
            num_samples=num_samples,
            global_batch_size=4,
            per_device_batch_size=micro,
            num_processes=num_processes,
            drop_last=drop_last,
        )
        for make, is_at_risk in MODELS.items():
            model = make()
            try:
                with lone_samples_refused(model, plan, config), evaluation_mode(model):
                    model(torch.randn(5, 6))
                is_refused = False
            except ConfigError as error:
                is_refused = True
                assert error.code == "BATCH_SIZE"  # noqa: PT017
                assert not drop_last or "drop-last" not in error.message  # noqa: PT017
            assert is_refused == fails(model, plan), (plan, make)
            assert not is_refused or (is_at_risk and has_lone_sample(plan))
            assert not [hook for each in model.modules() for hook in each._forward_pre_hooks]
            num_refused += is_refused
    assert num_refused > 40


def test_a_last_step_that_is_never_reached_is_no_mistake() -> None:
    plan = BatchPlan(num_samples=9, global_batch_size=4, per_device_batch_size=4)
    model = of_vectors()
    with lone_samples_refused(model, plan, TrainerConfig(max_steps=2)):
        model.eval()(torch.randn(5, 6))


DATA = TensorDataset(torch.randn(33, 6), torch.arange(33) % 3)


def train(folder: Path, batch: BatchConfig, max_steps: int | None = None) -> None:
    config = RecipeConfig(
        batch=batch,
        trainer=TrainerConfig(num_epochs=2, max_steps=max_steps),
        run=RunConfig(output_dir=folder, quiet=True),
    )
    with start_run(config, recipe="norms") as run:
        build_trainer(
            run,
            model=of_vectors(),
            task=ClassificationTask(),
            train_set=DATA,
            eval_sets=TensorDataset(torch.randn(10, 6), torch.arange(10) % 3),
        ).fit()


def test_a_run_is_refused_at_its_start_and_at_a_resume(tmp_path: Path) -> None:
    batch = BatchConfig(per_device_batch_size=8)
    for folder, before in (("new", None), ("resumed", 2)):
        if before is not None:
            whole = replace(batch, global_batch_size=8)
            train(tmp_path / folder, whole, max_steps=before)
        with pytest.raises(ConfigError, match="BATCH_SIZE.* 1 normalises over"):
            train(tmp_path / folder, batch)
    assert not list((tmp_path / "new" / "checkpoints").glob("step-*"))
    train(tmp_path / "dropped", replace(batch, drop_last=True))


def test_norms_over_all_processes_have_the_samples_of_all(tmp_path: Path) -> None:
    batch = BatchConfig(per_device_batch_size=16, global_batch_size=31)
    with pytest.raises(ConfigError):
        BatchPlan(num_samples=33, global_batch_size=31, per_device_batch_size=16, num_processes=2)
    batch = replace(batch, global_batch_size=30)  # the last 3 are 2 and 1: norms get 3
    processes.run(train, tmp_path / "run", batch, num_processes=2, folder=tmp_path / "logs")


def test_an_input_by_name_is_left_to_torch() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.norm(input=inputs)

    plan = BatchPlan(num_samples=9, global_batch_size=4, per_device_batch_size=4)
    with lone_samples_refused(model := Named(), plan, TrainerConfig()):
        model.eval()(torch.randn(5, 6))
