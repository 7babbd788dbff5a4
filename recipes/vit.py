"""Fine-tune a transformers image classifier on photos.

The export is a folder that AutoModelForImageClassification.from_pretrained loads.

python recipes/vit.py --dataset photos/ --val-fraction 0.1 --base google/vit-base-patch16-224-in21k
python recipes/vit.py --dataset photos/ --val-fraction 0.1    # a tiny one with random weights
"""

from __future__ import annotations

from dataclasses import dataclass

from accel_trainer import OptimizerConfig, RecipeConfig, RunResult, build_trainer, main, start_run
from accel_trainer.vision import (
    EvalTransform,
    ImageClassificationTask,
    PhotoAugmentConfig,
    PhotoConfig,
    build_photo_loaders,
    classification_metrics,
    load_photos,
)

try:
    import transformers as hf
except ImportError:
    fact = "recipes/vit.py needs transformers"
    raise SystemExit(f"{fact}: pip install 'accel-trainer[hf]'") from None

GRAY = (0.5, 0.5, 0.5)
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "patch_size": 8}


@dataclass(frozen=True, kw_only=True)
class Config(RecipeConfig):
    """The settings of `recipes/vit.py`."""

    dataset: str = "photos"
    """A folder of photos, parquet, tars or `save_to_disk` output, or OWNER/NAME on the hub."""
    photos: PhotoConfig = PhotoConfig(image_size=32)
    base: str | None = None
    """A folder, or OWNER/NAME on the hub, with an image classifier or its trunk, which has its own
    image size."""
    optimizer: OptimizerConfig = OptimizerConfig(name="adamw", learning_rate=1e-4)


def make_model(config: Config, names: dict[int, str]) -> hf.PreTrainedModel:
    """Return the model of the base with a new head for the classes, or a tiny one."""
    classes = {"id2label": names, "label2id": {name: label for label, name in names.items()}}
    if config.base is None:
        size = {"image_size": config.photos.image_size}
        return hf.ViTForImageClassification(hf.ViTConfig(**size, **TINY, **classes))
    return hf.AutoModelForImageClassification.from_pretrained(
        config.base, ignore_mismatched_sizes=True, **classes
    )


def train(config: Config) -> RunResult:
    """Train, evaluate and export. Runs in every process."""
    photos = load_photos(
        config.dataset,
        image_column=config.photos.image_column,
        label_column=config.photos.label_column,
        val_fraction=config.photos.val_fraction,
        cache_dir=config.run.cache_dir,
    )
    with start_run(config, recipe="vit") as run:
        model = make_model(config, dict(enumerate(photos.class_names)))
        size = model.config.image_size
        transform = EvalTransform(size=size, crop_ratio=1.0, mean=GRAY, std=GRAY)
        loader, eval_loader = build_photo_loaders(
            run, photos, augment=PhotoAugmentConfig(), transform=transform
        )
        trainer = build_trainer(
            run,
            model=model,
            # Of the image processors, Perceiver's crops before it resizes, as `transform` does.
            processor=hf.PerceiverImageProcessorPil(
                size={"height": size, "width": size},
                crop_size={"height": size, "width": size},
                resample=2,
                image_mean=GRAY,
                image_std=GRAY,
            ),
            task=ImageClassificationTask(),
            train_set=loader,
            eval_sets=eval_loader,
            metrics=classification_metrics(photos.num_classes),
            data_fingerprint=photos.fingerprint,
            export_config={  # for `accel-trainer predict`, with --onnx
                "in_channels": 3,
                "image_size": [size, size],
                "class_names": photos.class_names,
                "normalization": {"mean": GRAY, "std": GRAY},
                "eval_transform": transform.to_dict(),
            },
        )
        return trainer.fit()


if __name__ == "__main__":
    main(train, Config)
