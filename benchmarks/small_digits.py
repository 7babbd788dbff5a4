"""A recipe whose runs take seconds: a small network on the digits of scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from accel_trainer import (
    ClassificationTask,
    RecipeConfig,
    RunResult,
    build_trainer,
    main,
    start_run,
)
from accel_trainer.vision import (
    AugmentConfig,
    build_image_loaders,
    classification_metrics,
    load_images,
)


@dataclass(frozen=True, kw_only=True)
class Config(RecipeConfig):
    """The settings of this recipe."""

    augment: AugmentConfig = field(default_factory=AugmentConfig)


def train(config: Config) -> RunResult:
    """Train and evaluate two convolutions with dropout."""
    with start_run(config, recipe="small_digits") as run:
        images = load_images("digits", cache_dir=config.run.cache_dir)
        train_set, eval_set = build_image_loaders(run, images, augment=config.augment)
        model = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, images.num_classes)),
        )
        return build_trainer(
            run,
            model=model,
            task=ClassificationTask(),
            train_set=train_set,
            eval_sets=eval_set,
            metrics=classification_metrics(images.num_classes),
            data_fingerprint=images.fingerprint,
        ).fit()


if __name__ == "__main__":
    main(train, Config)
