"""Train a ResNet on CIFAR, on digits, or on a folder of images.

accelerate launch recipes/cifar.py                            # CIFAR-10 from the hub
accelerate launch recipes/cifar.py --dataset digits           # no download
accelerate launch recipes/cifar.py --dataset PATH --model resnet18 --epochs 30
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from accel_trainer import RecipeConfig, RunResult, build_trainer, main, start_run
from accel_trainer.vision import (
    AugmentConfig,
    BadImageConfig,
    ImageClassificationConfig,
    ImageClassificationTask,
    ModelConfig,
    WorstMistakes,
    build_image_loaders,
    build_model,
    classification_metrics,
    load_images,
    whiten,
)


@dataclass(frozen=True, kw_only=True)
class Config(RecipeConfig):
    """The settings of `recipes/cifar.py`."""

    dataset: str = "cifar10"
    """`cifar10`, `cifar100` (from the hub), `digits` (no download), or a folder of parquet, images
    or CIFAR binary."""
    bad_images: BadImageConfig = field(default_factory=BadImageConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    task: ImageClassificationConfig = field(default_factory=ImageClassificationConfig)


def train(config: Config) -> RunResult:
    """Train, evaluate and export. Runs in every process."""
    with start_run(config, recipe="cifar") as run:
        images = load_images(
            config.dataset,
            cache_dir=config.run.cache_dir,
            bad_images=config.bad_images,
        )
        loader, eval_loader = build_image_loaders(run, images, augment=config.augment)
        model = build_model(
            config.model,
            in_channels=images.num_channels,
            num_classes=images.num_classes,
            image_size=images.image_size,
            pretrained=run.checkpoint is None or bool(run.checkpoint.missing),
        )
        mistakes = WorstMistakes(run.folder, eval_loader, images.class_names)
        trainer = build_trainer(
            run,
            model=whiten(model, images),
            task=ImageClassificationTask(config.task, class_counts=loader.reader.class_counts),
            train_set=loader,
            eval_sets=eval_loader,
            metrics=[*classification_metrics(images.num_classes), mistakes],
            callbacks=[mistakes],
            data_fingerprint=images.fingerprint,
            export_config={
                "evaluation": {"tta": config.task.tta},
                "model": asdict(config.model),
                "in_channels": images.num_channels,
                "image_size": images.image_size,
                "class_names": images.class_names,
                "normalization": asdict(images.normalization),
            },
        )
        return trainer.fit()


if __name__ == "__main__":
    main(train, Config)
