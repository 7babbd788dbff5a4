"""A recipe on digits with two evaluation sets and a test set; the commands are tried on its run."""

from __future__ import annotations

from dataclasses import asdict, replace

import torch

from accel_trainer import (
    ConfusionMatrix,
    EvalLoader,
    MeanLoss,
    RunResult,
    build_trainer,
    main,
    start_run,
)
from accel_trainer.training.evaluation.metrics import TopKAccuracy
from accel_trainer.vision import (
    ImageClassificationTask,
    ImageReader,
    ImageSplit,
    WorstMistakes,
    build_image_loaders,
    build_model,
    load_images,
)
from recipes.cifar import Config


def train(config: Config) -> RunResult:
    """Train on digits, and evaluate on parts of their test images."""
    with start_run(config, recipe="sets") as run:
        images = load_images(
            config.dataset, cache_dir=config.run.cache_dir, bad_images=config.bad_images
        )
        loader, eval_loader = build_image_loaders(run, images, augment=config.augment)

        def part(start: int, stop: int) -> EvalLoader[ImageReader]:
            test = images.test
            kept = slice(start, stop)
            split: ImageSplit = replace(test, images=test.images[kept], labels=test.labels[kept])
            cpu = torch.device("cpu")
            return EvalLoader(
                ImageReader(split, normalization=images.normalization, device=cpu),
                batch_size=50,
                device=cpu,
                num_processes=run.accelerator.num_processes,
                process_index=run.accelerator.process_index,
            )

        mistakes = WorstMistakes(run.folder, eval_loader, images.class_names)
        shared = [MeanLoss(), TopKAccuracy(1), ConfusionMatrix(images.num_classes)]
        trainer = build_trainer(
            run,
            model=build_model(
                config.model,
                in_channels=images.num_channels,
                num_classes=images.num_classes,
                image_size=images.image_size,
            ),
            task=ImageClassificationTask(config.task),
            train_set=loader,
            eval_sets={"val": eval_loader, "hard": part(0, 90)},
            test_set=part(90, 240),
            metrics={"val": [*shared, mistakes], "hard": shared, "test_set": shared},
            callbacks=[mistakes],
            data_fingerprint=images.fingerprint,
            export_config={
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
