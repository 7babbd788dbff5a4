"""Train a ResNet or a timm model on photos; size, epochs and learning rate follow from the photos.

The photos are in a folder, parquet files, tars, or a dataset on the hub.

accelerate launch recipes/images.py --dataset photos/ --val-fraction 0.1
accelerate launch recipes/images.py --dataset photos/ --model resnet50 --pretrained
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from accel_trainer import RunResult, build_trainer, main, start_run
from accel_trainer.vision import (
    BY_RULE,
    ImageClassificationConfig,
    ImageClassificationTask,
    ModelConfig,
    PhotoAugmentConfig,
    PhotoConfig,
    PhotoRecipeConfig,
    WorstMistakes,
    build_model,
    build_photo_loaders,
    classification_metrics,
    load_photos,
    settings_for,
)


@dataclass(frozen=True, kw_only=True)
class Config(PhotoRecipeConfig):
    """The settings of `recipes/images.py`."""

    dataset: str = "photos"
    """A folder of photos, parquet, tars or `save_to_disk` output, or OWNER/NAME on the hub."""
    photos: PhotoConfig = PhotoConfig(image_size=BY_RULE)
    model: ModelConfig = field(default_factory=lambda: ModelConfig(name="resnet18"))
    augment: PhotoAugmentConfig = field(default_factory=PhotoAugmentConfig)
    task: ImageClassificationConfig = field(default_factory=ImageClassificationConfig)


def train(config: Config) -> RunResult:
    """Train, evaluate and export. Runs in every process."""
    photos = load_photos(
        config.dataset,
        image_column=config.photos.image_column,
        label_column=config.photos.label_column,
        val_fraction=config.photos.val_fraction,
        cache_dir=config.run.cache_dir,
    )
    config, chosen = settings_for(config, photos, recipe="images")
    with start_run(config, recipe="images") as run:
        image_size = [config.photos.image_size] * 2
        model = build_model(
            config.model,
            in_channels=3,
            num_classes=photos.num_classes,
            image_size=image_size,
            pretrained=run.checkpoint is None or bool(run.checkpoint.missing),
        )
        transform = config.photos.eval_transform(model)
        loader, eval_loader = build_photo_loaders(
            run, photos, augment=config.augment, transform=transform
        )
        loader.description += f"\n{chosen}"
        mistakes = WorstMistakes(run.folder, eval_loader, photos.class_names)
        trainer = build_trainer(
            run,
            model=model,
            task=ImageClassificationTask(config.task, class_counts=loader.reader.class_counts),
            train_set=loader,
            eval_sets=eval_loader,
            metrics=[*classification_metrics(photos.num_classes), mistakes],
            callbacks=[mistakes],
            data_fingerprint=photos.fingerprint,
            export_config={
                "evaluation": {"tta": config.task.tta},
                "model": asdict(config.model),
                "in_channels": 3,
                "image_size": image_size,
                "class_names": photos.class_names,
                "normalization": {"mean": transform.mean, "std": transform.std},
                "eval_transform": transform.to_dict(),
            },
        )
        return trainer.fit()


if __name__ == "__main__":
    main(train, Config)
