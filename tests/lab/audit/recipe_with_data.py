"""A recipe whose samples are in a file, so that one of them can be changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, kw_only=True)
class Config(RecipeConfig):
    """The settings of the recipe."""

    samples: Path = Path("samples.pt")
    """Inputs [N, 8] and classes [N]."""


def train(config: Config) -> RunResult:
    """Train a small network with a norm and dropout."""
    with start_run(config, recipe="data") as run:
        inputs, classes = torch.load(config.samples)
        model = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)
        )
        trainer = build_trainer(
            run,
            model=model,
            task=ClassificationTask(),
            train_set=TensorDataset(inputs[:96], classes[:96]),
            eval_sets=TensorDataset(inputs[96:], classes[96:]),
        )
        return trainer.fit()


if __name__ == "__main__":
    main(train, Config)
