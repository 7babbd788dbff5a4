"""A recipe with what no seed decides: noise from the machine, and data of today."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from accel_trainer import (
    ClassificationTask,
    RecipeConfig,
    RunResult,
    build_trainer,
    main,
    start_run,
)

PLANTED = os.environ["PLANTED"]


class Noise(nn.Module):
    """Adds noise to [B, D], a different one in each process that trains."""

    def __init__(self) -> None:
        super().__init__()
        seed = int.from_bytes(os.urandom(4), "big")
        self._noise = torch.rand(36, generator=torch.Generator().manual_seed(seed))

    def forward(self, values: Tensor) -> Tensor:
        return values + 0.1 * self._noise


def train(config: RecipeConfig) -> RunResult:
    """Train a linear model on 160 pictures of two classes."""
    with start_run(config, recipe="planted") as run:
        generator = torch.Generator().manual_seed(len(PLANTED))
        pictures = torch.rand(192, 1, 6, 6, generator=generator)
        dataset = TensorDataset(pictures, (pictures.mean((1, 2, 3)) > 0.5).long())
        parts = [Subset(dataset, range(*ends)) for ends in ((160,), (160, 192))]
        noise = Noise() if PLANTED == "noise" else nn.Identity()
        model = nn.Sequential(nn.Flatten(), noise, nn.Linear(36, 2))
        return build_trainer(
            run, model=model, task=ClassificationTask(), train_set=parts[0], eval_sets=parts[1]
        ).fit()


if __name__ == "__main__":
    main(train, RecipeConfig)
