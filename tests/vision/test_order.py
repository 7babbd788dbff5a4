"""Images and photos in another order: repetitions, mixes, and weights of the classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from accel_trainer import Batch, BatchConfig, ConfigError, TrainLoader
from accel_trainer.data.order import SampleOrder, choose_order
from accel_trainer.vision import (
    AugmentConfig,
    AugmentedImageReader,
    AugmentedPhotoReader,
    ImageClassificationConfig,
    ImageClassificationTask,
    ImageSplit,
    Normalization,
    PhotoAugmentConfig,
)
from accel_trainer.vision.data.eval_transform import EvalTransform
from tests.vision.make_photos import mixed_photos, split_of

NUM = 12
CPU = torch.device("cpu")
HEAVY = torch.tensor([1.0] * (NUM - 1) + [50.0])  # the last sample again and again


def plan_of(order: SampleOrder) -> Any:
    config = BatchConfig(per_device_batch_size=3)
    return config.plan(order.num_samples, num_processes=1)


def image_loader(order: SampleOrder, **augment: Any) -> TrainLoader[AugmentedImageReader]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 255, (NUM, 3, 8, 8), generator=generator).byte()
    reader = AugmentedImageReader(
        # Each image is of a class of its own: the targets of a mix say which two it has.
        ImageSplit(images=images, labels=torch.arange(NUM), num_classes=NUM),
        normalization=Normalization(mean=(0.5,) * 3, std=(0.5,) * 3),
        device=CPU,
        augment=AugmentConfig(**{"crop_padding": 3, "crop_mode": "reflect", **augment}),
        seed=0,
        kept=order.kept,
    )
    return TrainLoader(reader, plan_of(order), seed=0, device=CPU, order=order)


def photo_loader(order: SampleOrder, **augment: Any) -> TrainLoader[AugmentedPhotoReader]:
    reader = AugmentedPhotoReader(
        split_of(mixed_photos(NUM), num_classes=NUM),
        transform=EvalTransform(size=8),
        device=CPU,
        num_workers=2,
        augment=PhotoAugmentConfig(**augment),
        num_classes=NUM,
        seed=0,
        kept=order.kept,
    )
    return TrainLoader(reader, plan_of(order), seed=0, device=CPU, order=order)


LOADERS = pytest.mark.parametrize("make_loader", [image_loader, photo_loader])


def epoch_of(loader: Any, epoch: int = 0) -> Batch:
    """Return all samples of an epoch in one batch."""
    batches = [b for step in loader.step_batches(epoch, 0) for b in step.micro_batches]
    inputs, targets, ids = (
        torch.cat([getattr(batch, name) for batch in batches])
        for name in ("inputs", "targets", "sample_ids")
    )
    return Batch(inputs, targets, ids)


@LOADERS
def test_a_repeated_sample_is_augmented_anew_each_time(make_loader: Any) -> None:
    order = choose_order(BatchConfig(), NUM, weights=HEAVY)
    batch = epoch_of(make_loader(order))
    pictures = batch.inputs[batch.sample_ids == NUM - 1]
    assert len(pictures) >= 8  # of 12
    assert len(pictures.flatten(1).unique(dim=0)) >= len(pictures) - 2  # few crops are alike
    again = epoch_of(make_loader(order))
    assert again.inputs.equal(batch.inputs)
    assert set(batch.sample_ids.tolist()) <= set(range(NUM))


@LOADERS
def test_the_first_time_a_sample_is_as_in_the_uniform_order(make_loader: Any) -> None:
    weighted = choose_order(BatchConfig(), NUM, weights=HEAVY)
    drawn = weighted.draw(seed=0, epoch=0)
    batch = epoch_of(make_loader(weighted))
    uniform = epoch_of(make_loader(choose_order(BatchConfig(), NUM)))
    for place in (drawn < NUM).nonzero().flatten().tolist():
        (same_sample,) = (uniform.sample_ids == drawn[place]).nonzero().flatten().tolist()
        assert batch.inputs[place].equal(uniform.inputs[same_sample])


@LOADERS
def test_a_sample_that_is_left_out_is_never_mixed_in(make_loader: Any, tmp_path: Path) -> None:
    listed = tmp_path / "bad.txt"
    listed.write_text("0\n1\n2\n3\n4\n5\n6\n7\n11")
    loader = make_loader(choose_order(BatchConfig(leave_out=listed), NUM), mixup=1.0, cutmix=1.0)
    seen = torch.stack([epoch_of(loader, epoch).targets.sum(0) for epoch in range(20)]).sum(0)
    assert (seen > 0).nonzero().flatten().tolist() == [8, 9, 10]


@LOADERS
def test_mixes_of_a_repeated_sample_differ(make_loader: Any) -> None:
    order = choose_order(BatchConfig(), NUM, weights=HEAVY)
    batch = epoch_of(make_loader(order, mixup=1.0))
    mixes = batch.targets[batch.sample_ids == NUM - 1]
    assert len(mixes.unique(dim=0)) == len(mixes)


# --- weights of the classes ---


def task_of(counts: Tensor | None) -> ImageClassificationTask:
    config = ImageClassificationConfig(class_weights="balanced")
    return ImageClassificationTask(config, class_counts=counts)


def test_balanced_weights_divide_by_the_samples_of_a_class() -> None:
    counts = torch.tensor([6, 3, 0, 1])  # no sample of class 2: 10 samples of 3 classes
    logits = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 3, 0, 0, 1, 3, 0])
    batch = Batch(torch.zeros(8, 1), labels, torch.arange(8))
    losses = task_of(counts).loss(logits, batch).losses
    by_hand = torch.tensor([10 / (3 * 6), 10 / (3 * 3), 0.0, 10 / (3 * 1)])
    expected = F.cross_entropy(logits, labels, reduction="none") * by_hand[labels]
    assert torch.allclose(losses, expected)
    # Over the training samples their mean is 1: the learning rate keeps its meaning.
    assert float((by_hand * counts).sum() / counts.sum()) == pytest.approx(1)


def test_balanced_weights_are_for_training_only_and_part_of_the_task() -> None:
    model = torch.nn.Identity()
    batch = Batch(torch.randn(4, 2), torch.tensor([0, 0, 0, 1]), torch.arange(4))
    balanced = task_of(torch.tensor([3, 1]))
    plain = ImageClassificationTask()
    weighted, unweighted = (task.eval_step(model, batch).losses for task in (balanced, plain))
    assert weighted.equal(unweighted)
    assert balanced.fingerprint() not in ("", task_of(torch.tensor([1, 3])).fingerprint())


def test_balanced_weights_without_counts_are_one_line() -> None:
    with pytest.raises(ConfigError, match="--task.class-weights balanced follows .* class_counts="):
        task_of(None)
