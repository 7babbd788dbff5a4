"""A small image run for tests, in one or several processes: all is real, nothing is downloaded."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_trainer import (
    BatchConfig,
    Callback,
    CheckpointConfig,
    ClassificationTask,
    ConfusionMatrix,
    EvalLoader,
    MeanLoss,
    OptimizerConfig,
    Reader,
    RecipeConfig,
    Run,
    RunConfig,
    RunResult,
    RuntimeConfig,
    SampleReader,
    Schedule,
    ScheduleConfig,
    Task,
    TopKAccuracy,
    Trainer,
    TrainerConfig,
    TrainLoader,
    build_trainer,
    start_run,
)
from accel_trainer.vision import (
    AugmentConfig,
    AugmentedImageReader,
    ImageDataset,
    ImageReader,
    ImageSplit,
    Normalization,
)

from .variants import NUM_THREADS

NUM_CLASSES = 4


def make_images(num_train: int, num_test: int = 37) -> ImageDataset:
    """Noisy bars whose direction is the label: learnable, 8x8, the same everywhere."""
    generator = torch.Generator().manual_seed(7)

    def split(num: int) -> ImageSplit:
        labels = torch.arange(num) % NUM_CLASSES
        images = torch.randint(0, 120, (num, 8, 8, 3), generator=generator, dtype=torch.uint8)
        for image, label in zip(images, labels.tolist(), strict=True):
            view = image if label % 2 else image.transpose(0, 1)
            view[2 + label // 2 * 3] += 120
        return ImageSplit(images=images.permute(0, 3, 1, 2), labels=labels, num_classes=NUM_CLASSES)

    return ImageDataset(
        train=split(num_train),
        test=split(num_test),
        class_names=tuple("abcd"),
        normalization=Normalization(mean=(0.25,) * 3, std=(0.25,) * 3),
        fingerprint=f"bars-{num_train}-{num_test}",
    )


class Bars:
    """The same images as a map-style dataset that augments with all three global generators."""

    def __init__(self, split: ImageSplit) -> None:
        self._images = split.images.float() / 255
        self._labels = split.labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self._images[index]
        image = image.flip(-1) if random.random() < 0.5 else image
        image = image.roll(int(np.random.randint(-1, 2)), dims=-2)
        return image + 0.1 * torch.randn(image.shape), self._labels[index]


class SmallNet(nn.Module):
    """Two convolutions with a norm and dropout: [B, 3, H, W] -> [B, K]."""

    def __init__(self, *, norm: str, dropout: float = 0.0) -> None:
        super().__init__()

        def normed(channels: int) -> nn.Module:
            return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(2, channels)

        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            normed(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, bias=False),
            normed(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(32, NUM_CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def add_callback(recipe: ModuleType, callback: Callback) -> None:
    """Let the trainer of a recipe have one callback more, in this process."""
    build = recipe.build_trainer

    def build_with_callback(run: Run, *, callbacks: Sequence[Callback], **parts: Any) -> Trainer:
        return build(run, callbacks=[*callbacks, callback], **parts)

    recipe.build_trainer = build_with_callback


def make_config(folder: Path, **changes: object) -> RecipeConfig:
    """Return a config of 2 epochs with all that has state; `changes` are replaced sub-configs."""
    config = RecipeConfig(
        seed=3,
        batch=BatchConfig(per_device_batch_size=16, eval_batch_size=10),
        trainer=TrainerConfig(num_epochs=2, log_every_n_steps=3, max_grad_norm=5.0, ema_decay=0.9),
        optimizer=OptimizerConfig(learning_rate=0.05),
        schedule=ScheduleConfig(shape="cosine", warmup_epochs=0.5),
        checkpoint=CheckpointConfig(every_n_steps=1),
        runtime=RuntimeConfig(num_threads=NUM_THREADS, timeout_s=300),
        run=RunConfig(output_dir=folder),
    )
    return replace(config, **changes)


def train(
    config: RecipeConfig,
    *,
    num_train: int = 72,
    num_test: int = 37,
    norm: str = "group",
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    callbacks: tuple[object, ...] = (),
    task: Task | None = None,
    scaler: torch.amp.GradScaler | None = None,
    num_workers: int | None = None,
    optimizer: Callable[[nn.Module], Optimizer] | None = None,
    schedule: Schedule | None = None,
    net: Callable[[], nn.Module] | None = None,
    fit: Callable[[Trainer], RunResult] = Trainer.fit,
    trainer_class: type[Trainer] = Trainer,
    states: Any = MappingProxyType({}),
) -> RunResult:
    """Train the small net, or another; called in every process of a launch.

    Its images lie in memory, or come from a dataset by `num_workers` (0: in this process). `fit`
    owns the loop.
    """
    augment = AugmentConfig(crop_padding=1, crop_mode="reflect", flip="random", mixup=0.2)
    images = make_images(num_train, num_test)
    with start_run(config, recipe="workload") as run:
        accelerator = run.accelerator
        accelerator.scaler = scaler
        where = {"process_index": accelerator.process_index, "device": accelerator.device}
        plan = run.config.batch.plan(num_train, num_processes=accelerator.num_processes)
        pixels = {"normalization": images.normalization, "device": accelerator.device}
        reader: Reader = AugmentedImageReader(
            images.train, augment=augment, seed=config.seed, **pixels
        )
        if num_workers is not None:
            reader = SampleReader(
                Bars(images.train), accelerator.device, seed=config.seed, num_workers=num_workers
            )
        loader = TrainLoader(reader, plan, seed=config.seed, **where)
        model = SmallNet(norm=norm, dropout=dropout).to(dtype) if net is None else net()
        if dtype != torch.float32:  # the loaders give float32
            model.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(dtype),))
        trainer = build_trainer(
            run,
            model=model,
            task=task or ClassificationTask(),
            train_set=loader,
            eval_sets=EvalLoader(
                ImageReader(images.test, **pixels),
                batch_size=config.batch.eval_batch_size,
                num_processes=accelerator.num_processes,
                num_parts=plan.num_parts,
                **where,
            ),
            metrics=[MeanLoss(), TopKAccuracy(), ConfusionMatrix(NUM_CLASSES)],
            data_fingerprint=images.fingerprint,
            export_config={"norm": norm},
            optimizer=optimizer,
            schedule=schedule,
            callbacks=callbacks,
            trainer_class=trainer_class,
            states=states,
        )
        return fit(trainer)


def main() -> None:
    """Run from a command line, so that a launcher can start it and a test can kill it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--global-batch-size", type=int)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--num-train", type=int, default=72)
    parser.add_argument("--norm", default="group")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--max-steps", type=int)
    options = parser.parse_args()
    config = make_config(
        options.folder,
        batch=BatchConfig(
            per_device_batch_size=options.batch_size,
            global_batch_size=options.global_batch_size,
            accumulation_steps=options.accumulate,
            eval_batch_size=10,
        ),
    )
    config = replace(
        config,
        trainer=replace(config.trainer, num_epochs=options.epochs, max_steps=options.max_steps),
    )
    dtype = getattr(torch, options.dtype)
    result = train(
        config, num_train=options.num_train, norm=options.norm, dropout=options.dropout, dtype=dtype
    )
    raise SystemExit(75 if result.state == "preempted" else 0)


if __name__ == "__main__":
    main()
