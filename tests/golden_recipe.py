"""A recipe with two evaluation sets and a test set, which skips the step of a sample with NaN."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from accel_trainer import (
    ClassificationTask,
    ConfusionMatrix,
    MeanLoss,
    RecipeConfig,
    RunResult,
    TopKAccuracy,
    build_trainer,
    main,
    start_run,
)


def points(num_samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(num_samples) % 3
    inputs = torch.randn(num_samples, 8, generator=generator) + targets[:, None]
    return TensorDataset(inputs, targets)


def train(config: RecipeConfig) -> RunResult:
    """Train a small network with dropout and a BatchNorm on points of three classes."""
    with start_run(config, recipe="sets") as run:
        train_set = points(1024, seed=0)
        train_set.tensors[0][17] = torch.nan
        model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)
        )
        return build_trainer(
            run,
            model=model,
            task=ClassificationTask(),
            train_set=train_set,
            eval_sets={"val": points(100, seed=1), "hard": points(50, seed=2)},
            test_set=points(70, seed=3),
            metrics=[MeanLoss(), TopKAccuracy(), ConfusionMatrix(3)],
        ).fit()


if __name__ == "__main__":
    main(train, RecipeConfig)
