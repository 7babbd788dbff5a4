"""A small recipe with one planted reason, `--plant NAME`, why two runs of it are not the same."""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, library, nn
from torch.utils.data import default_collate

from accel_trainer import (
    Callback,
    ClassificationTask,
    DatasetOptions,
    RecipeConfig,
    RunResult,
    build_trainer,
    main,
    start_run,
)

OWN = random.SystemRandom()  # it has no state
GENERATOR = torch.Generator()


@dataclass(frozen=True, kw_only=True)
class Config(RecipeConfig):
    """The settings of the recipe."""

    plant: str = "nothing"
    """What is planted."""
    data: str = "first"
    """The file of data."""


class Pictures:
    """Random pictures [3, 8, 8] of 4 classes."""

    def __init__(self, plant: str, file: str = "first", size: int = 192) -> None:
        generator = torch.Generator().manual_seed(size)
        self.pictures = torch.randn(size, 3, 8, 8, generator=generator)
        self.labels = torch.randint(0, 4, (size,), generator=generator)
        if file == "changed":
            self.pictures[17, 0, 0, 0] += 1
        self.plant = plant
        self.order = list(range(size))
        self.scratch = torch.zeros(3, 8, 8)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.plant == "dataset that shuffles itself" and index % 8 == 0:
            OWN.shuffle(self.order)
        picture = self.pictures[self.order[index]]
        if self.plant == "unseeded augmentation" and np.random.default_rng().random() < 0.5:
            picture = picture.flip(-1)
        if self.plant == "race in a worker":
            picture = self.raced(picture)
        return picture, int(self.labels[index])

    def raced(self, picture: Tensor) -> Tensor:
        """Return the picture plus what a thread has written into a shared buffer by now."""

        def write() -> None:
            for value in range(2000):
                self.scratch.fill_(value)

        thread = threading.Thread(target=write)
        thread.start()
        raced = picture + self.scratch[0, 0, 0] / 1000
        thread.join()
        return raced


def own_random_collate(samples: list[Any]) -> Any:
    """Shift the whole batch by a number of a generator of its own."""
    inputs, targets = default_collate(samples)
    return inputs + OWN.random(), targets


def global_random_collate(samples: list[Any]) -> Any:
    """Shift the whole batch by a number of Python's global generator."""
    inputs, targets = default_collate(samples)
    return inputs + random.random(), targets


class Net(nn.Module):
    """Two convolutions and a linear layer, with a plant between them."""

    def __init__(self, plant: str) -> None:
        super().__init__()
        self.plant = plant
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.middle = Middle(plant)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the logits [B, 4]."""
        features = torch.relu(self.norm(self.first(pictures)))
        features = torch.relu(self.second(self.middle(features)))
        return self.head(features.mean((2, 3)))


class Middle(nn.Module):
    """Changes nothing, unless something is planted in it."""

    def __init__(self, plant: str) -> None:
        super().__init__()
        self.plant = plant
        self.num_calls = 0
        if plant == "assigned buffer":
            self.register_buffer("average", torch.zeros(8), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Return the features [B, 8, H, W]."""
        match self.plant:
            case "generator of its own":
                if not self.num_calls:
                    GENERATOR.seed()
                    self.num_calls = 1
                kept = torch.rand(features.shape, generator=GENERATOR) > 0.1
                return features * kept
            case "sum in random order":
                return RandomOrder.apply(features)
            case "Python state" if self.training:
                self.num_calls += 1
                return features * (1 + 0.01 * self.num_calls)
            case "assigned buffer" if self.training:
                mean = features.detach().mean((0, 2, 3))
                self.average = 0.9 * self.average + 0.1 * mean
                return features - self.average[:, None, None]
            case "hash order":
                total = features
                for name in {"one", "seven", "eleven", "seventeen", "twenty-three"}:
                    total = total + 0.1 * len(name) * features.mean()
                return total
        return features


class RandomOrder(torch.autograd.Function):
    """A gradient that is summed in another order each time, like atomic additions on a GPU."""

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        return sums_in_any_order(features)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@library.custom_op("planted::sums_in_any_order", mutates_args=())
def sums_in_any_order(features: Tensor) -> Tensor:
    """Add the mean over all pictures to each, in an order that the operating system decides."""
    order = list(range(len(features)))
    random.Random(os.urandom(8)).shuffle(order)
    total = torch.zeros_like(features[0])
    for index in order:
        total += features[index] * 0.1
    return features + total / len(order)


class TimedTask(ClassificationTask):
    """Scales the inputs by the time of day."""

    def step(self, model: nn.Module, batch: Any) -> Any:
        """Return the losses."""
        shifted = batch.map(lambda each: each * (1 + time.time() % 1) if each.ndim > 1 else each)
        return super().step(model, shifted)


class Touch(Callback):
    """Adds noise to a weight after some steps."""

    def on_step_end(self, trainer: Any, report: Any) -> None:
        """Add noise after step 3."""
        if report.optimizer_step == 3:
            with torch.no_grad():
                trainer.model.second.weight.mul_(1 + OWN.random())


def train(config: Config) -> RunResult:
    """Train the net."""
    plant = config.plant
    with start_run(config, recipe="planted") as run:
        collates = {"collate": own_random_collate, "global random": global_random_collate}
        options = DatasetOptions(collate=collates.get(plant, default_collate))
        return build_trainer(
            run,
            model=Net(plant),
            task=TimedTask() if plant == "time in a task" else ClassificationTask(),
            train_set=Pictures(plant, config.data),
            eval_sets=Pictures("nothing", size=48),
            options=options,
            callbacks=[Touch()] if plant == "callback" else [],
        ).fit()


if __name__ == "__main__":
    main(train, Config)
