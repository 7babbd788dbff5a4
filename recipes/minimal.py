"""Your own data and your own model: copy this file and change the three marked lines."""

from accel_trainer import (
    ClassificationTask,
    RecipeConfig,
    RunResult,
    build_trainer,
    main,
    start_run,
)

import torch
from sklearn import datasets
from torch import nn
from torch.utils.data import TensorDataset, random_split


def train(config: RecipeConfig) -> RunResult:
    """Train a small network on 569 breast-cancer diagnoses, which come with scikit-learn."""
    with start_run(config, recipe="minimal") as run:
        data = datasets.load_breast_cancer(return_X_y=True)  # yours: inputs [N, ...], class ids [N]
        inputs, targets = map(torch.tensor, data)
        inputs = ((inputs - inputs.mean(0)) / inputs.std(0)).float()
        dataset = TensorDataset(inputs, targets)
        train_set, eval_set = random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0))
        model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 2))  # yours: any module
        task = ClassificationTask()  # yours: what turns a batch into losses
        return build_trainer(
            run, model=model, task=task, train_set=train_set, eval_sets=eval_set
        ).fit()


if __name__ == "__main__":
    main(train, RecipeConfig)
