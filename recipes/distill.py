"""Train a small network on digits that also learns from the logits of a larger, trained one.

python recipes/cifar.py --dataset digits --model resnet20 --output-dir runs/teacher
python recipes/distill.py --teacher runs/teacher/export/model.safetensors
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from accel_trainer import (
    Batch,
    ClassificationTask,
    ConfigError,
    RecipeConfig,
    RunResult,
    StepOutput,
    build_trainer,
    main,
    start_run,
)
from accel_trainer.vision import (
    AugmentConfig,
    ModelConfig,
    build_image_loaders,
    build_model,
    classification_metrics,
    load_images,
)

import torch
from safetensors.torch import load_file, save
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Config(RecipeConfig):
    """The settings of every recipe, of the student and of the teacher."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(name="resnet8"))
    teacher: str = "runs/teacher/export/model.safetensors"
    """The exported weights of a run of `recipes/cifar.py` on the digits."""
    teacher_model: ModelConfig = field(default_factory=lambda: ModelConfig(name="resnet20"))
    weight: float = 0.5
    """The part of the teacher in the loss (0..1)."""
    temperature: float = 4.0
    """Divides the logits of both before they are compared."""


class DistillationTask:
    """Classification that also learns from the logits of a `teacher`.

    The loss is (1 - weight) * cross-entropy + weight * T**2 * KL(teacher || student) at temperature
    T (Hinton et al. 2015, arXiv 1503.02531). The task `labels` computes the cross-entropy and
    evaluates.
    """

    def __init__(
        self,
        teacher: nn.Module,
        *,
        weight: float = 0.5,
        temperature: float = 4.0,
        labels: ClassificationTask | None = None,
    ) -> None:
        self._teacher = teacher.eval().requires_grad_(False)
        self._weight = weight
        self._temperature = temperature
        self._labels = labels or ClassificationTask()
        self.eval_step = self._labels.eval_step

    def fingerprint(self) -> str:
        """Return a hash of the teacher's weights and the options: a resume with others is an error.

        The hash is stored with the checkpoints, which do not contain the teacher.
        """
        weights = {name: value.contiguous() for name, value in self._teacher.state_dict().items()}
        options = f"{self._weight} {self._temperature} {self._labels.fingerprint()}"
        return hashlib.sha256(save(weights) + options.encode()).hexdigest()

    def step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the weighted sums of both losses [B]."""
        logits = model(batch.inputs)
        labels = self._labels.loss(logits, batch)
        with torch.no_grad():
            # It moves to the device at the first batch.
            teacher_logits = self._teacher.to(batch.sample_ids.device)(batch.inputs)
        student = F.log_softmax(logits / self._temperature, 1)
        teacher = F.log_softmax(teacher_logits / self._temperature, 1)
        divergence = F.kl_div(student, teacher, reduction="none", log_target=True).sum(1)
        imitation = divergence * self._temperature**2
        if labels.num_items is not None:  # the weights of the labels, 0 for an ignored one
            imitation = imitation * labels.num_items
        losses = (1 - self._weight) * labels.losses + self._weight * imitation
        return labels._replace(losses=losses)


def train(config: Config) -> RunResult:
    """Train, evaluate and export. Runs in every process."""
    if not Path(config.teacher).is_file():
        raise ConfigError("CONFIG", f"--teacher {config.teacher} is no file: train a teacher first")
    with start_run(config, recipe="distill") as run:
        images = load_images("digits", cache_dir=config.run.cache_dir)
        augment = AugmentConfig(crop_padding=1, flip="none")
        loader, eval_loader = build_image_loaders(run, images, augment=augment)
        sizes = {"in_channels": images.num_channels, "num_classes": images.num_classes}
        teacher = build_model(config.teacher_model, **sizes)
        teacher.load_state_dict(load_file(config.teacher))
        return build_trainer(
            run,
            model=build_model(config.model, **sizes),
            task=DistillationTask(teacher, weight=config.weight, temperature=config.temperature),
            train_set=loader,
            eval_sets=eval_loader,
            metrics=classification_metrics(images.num_classes),
            data_fingerprint=images.fingerprint,
        ).fit()


if __name__ == "__main__":
    main(train, Config)
