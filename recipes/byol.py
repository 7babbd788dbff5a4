"""Learn features of digits without their labels (BYOL), judged by their nearest neighbours.

python recipes/byol.py
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from accel_trainer import (
    Batch,
    Callback,
    OptimizerConfig,
    RecipeConfig,
    RunResult,
    StepOutput,
    StepReport,
    TrainerConfig,
    TrainerView,
    build_trainer,
    main,
    start_run,
)

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Config(RecipeConfig):
    """The settings of every recipe, with AdamW and more epochs."""

    optimizer: OptimizerConfig = OptimizerConfig(name="adamw", learning_rate=2e-3)
    trainer: TrainerConfig = TrainerConfig(num_epochs=20)


class Student(nn.Module):
    """Features of pictures [B, 1, 8, 8], and a prediction of the teacher's: [B, 64] each."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2)]
        self.encoder = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 64))
        self.predictor = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the predictions."""
        return self.predictor(self.encoder(pictures))


class Byol(Callback):
    """From one view of a picture, predict the features that the teacher has of a different one.

    The teacher follows the encoder.
    """

    def __init__(self, teacher: nn.Module) -> None:
        self.teacher = teacher

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the cosine distances [B], summed over both directions."""
        one, two = view(batch.inputs), view(batch.inputs)
        with torch.no_grad():
            targets = self.teacher(torch.cat([two, one]))
        predicted = model(torch.cat([one, two]))
        return StepOutput(2 - F.cosine_similarity(predicted, targets).view(2, -1).sum(0))

    @torch.no_grad()
    def on_step_end(self, trainer: TrainerView, report: StepReport) -> None:
        """Move the teacher's weights a hundredth of the way, after a step that changed others."""
        pairs = zip(self.teacher.parameters(), trainer.model.encoder.parameters(), strict=True)
        for mine, theirs in () if report.was_skipped else pairs:
            mine.lerp_(theirs, 0.01)


def view(pictures: Tensor) -> Tensor:
    """Return the pictures with noise and other contrasts."""
    contrasts = 0.6 + 0.8 * torch.rand(len(pictures), 1, 1, 1, device=pictures.device)
    return pictures * contrasts + 0.2 * torch.randn_like(pictures)


@dataclass(frozen=True)
class Neighbours:
    """How many of the first 400 pictures have the label of the one of the rest that is nearest."""

    pictures: Tensor
    labels: Tensor
    monitors = {"neighbours": True}  # noqa: RUF012

    def run(self, model: nn.Module, position: Any, stop_flag: Any) -> dict[str, float]:
        """Return the fraction, as a number where more is better."""
        features = F.normalize(model.encoder(self.pictures))
        found = self.labels[400:][(features[:400] @ features[400:].T).argmax(1)]
        return {"neighbours": float((found == self.labels[:400]).double().mean())}


def train(config: Config) -> RunResult:
    """Train, evaluate and export. Runs in every process."""
    pixels, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
    pictures = pixels.float().view(-1, 1, 8, 8) / 16
    with start_run(config, recipe="byol") as run:
        device = run.accelerator.device
        student = Student()
        teacher = copy.deepcopy(student.encoder).requires_grad_(False).to(device)
        byol = Byol(teacher)
        return build_trainer(
            run,
            model=student,
            task=byol,
            train_set=[(picture, 0) for picture in pictures[400:]],
            eval_sets=Neighbours(pictures.to(device), labels.to(device)),
            callbacks=[byol],
            states={"teacher": teacher},
        ).fit()


if __name__ == "__main__":
    main(train, Config)
