"""A recipe of 60 tiny steps on pictures of noise, of which one has values that no other has."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from accel_trainer import (
    ClassificationTask,
    RecipeConfig,
    RunResult,
    build_trainer,
    main,
    start_run,
)

POISON = 77
"""The id of the sample."""


def train(config: RecipeConfig) -> RunResult:
    """Train a linear model on 160 pictures of two classes."""
    with start_run(config, recipe="poisoned") as run:
        generator = torch.Generator().manual_seed(0)
        pictures = torch.rand(192, 1, 6, 6, generator=generator)
        targets = (pictures.mean((1, 2, 3)) > 0.5).long()
        pictures[POISON] *= 300
        targets[POISON] = 0
        dataset = TensorDataset(pictures, targets)
        parts = [torch.utils.data.Subset(dataset, range(*ends)) for ends in ((160,), (160, 192))]
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 2))
        return build_trainer(
            run, model=model, task=ClassificationTask(), train_set=parts[0], eval_sets=parts[1]
        ).fit()


if __name__ == "__main__":
    main(train, RecipeConfig)
