from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image

from accel_trainer import (
    BatchConfig,
    DatasetOptions,
    EvalLoader,
    TrainLoader,
    build_train_loader,
)
from accel_trainer.core.batch_plan import BatchPlan
from accel_trainer.core.errors import ConfigError, DataError
from accel_trainer.core.types import Batch, EvalSource, Loader
from accel_trainer.vision import (
    AugmentConfig,
    AugmentedImageReader,
    AugmentedPhotoReader,
    EvalTransform,
    ImageReader,
    ImageSplit,
    Normalization,
    PhotoAugmentConfig,
    PhotoDataset,
    PhotoReader,
    PhotoSplit,
)
from accel_trainer.vision.augment.batch import draw_mix, draw_partners
from tests import processes

from .make_photos import encoded, mixed_photos, split_of

CPU, SIZE = torch.device("cpu"), 15
TRANSFORM = EvalTransform(size=SIZE)
PLAIN = PhotoAugmentConfig()
EVERYTHING = PhotoAugmentConfig(
    color_jitter=(0.4, 0.4, 0.4, 0.1), policy="randaugment", erase=0.5, mixup=0.5, cutmix=1.0
)
TRIVIAL = PhotoAugmentConfig(
    crop="padded", flip="alternating", policy="trivialaugment", crop_mode="zero"
)


def make_loader(
    *,
    photos: PhotoSplit | None = None,
    global_batch: int = 8,
    num_processes: int = 1,
    micro: int = 64,
    process_index: int = 0,
    augment: PhotoAugmentConfig = PLAIN,
    transform: EvalTransform = TRANSFORM,
    num_workers: int = 0,
) -> TrainLoader[AugmentedPhotoReader]:
    photos = photos or split_of(mixed_photos(21))
    plan = BatchPlan(
        num_samples=len(photos),
        global_batch_size=global_batch,
        per_device_batch_size=micro,
        num_processes=num_processes,
    )
    reader = AugmentedPhotoReader(
        photos,
        transform=transform,
        device=CPU,
        num_workers=num_workers,
        augment=augment,
        num_classes=3,
        seed=5,
    )
    return TrainLoader(reader, plan, seed=5, device=CPU, process_index=process_index)


def batches_of(
    loader: TrainLoader[AugmentedPhotoReader], *, epoch: int = 1, first_step: int = 0
) -> list[list[Batch]]:
    return [list(step_batch.micro_batches) for step_batch in loader.step_batches(epoch, first_step)]


def rows_of(batches: Sequence[Batch]) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    return [
        (sample, batch.inputs[row], batch.targets[row])
        for batch in batches
        for row, sample in enumerate(batch.sample_ids.tolist())
    ]


def expect_same(found: Sequence[Batch], expected: Sequence[Batch]) -> None:
    pairs = list(zip(rows_of(found), rows_of(expected), strict=True))
    assert pairs or not expected
    for (left_id, left, left_target), (right_id, right, right_target) in pairs:
        assert left_id == right_id
        assert torch.equal(left, right)
        assert torch.equal(left_target, right_target)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_processes", [1, 2, 4])
@pytest.mark.parametrize(
    "augment", [PLAIN, EVERYTHING, TRIVIAL], ids=["plain", "everything", "trivial"]
)
def test_photos_have_the_same_pixels_for_any_processes_and_workers(
    augment: PhotoAugmentConfig, num_processes: int, num_workers: int
) -> None:
    expected = batches_of(make_loader(augment=augment))
    assert sorted(sample for step in expected for sample, _, _ in rows_of(step)) == list(range(21))
    for micro in (64, 1, 3):
        loaders = [
            make_loader(
                augment=augment,
                num_processes=num_processes,
                process_index=index,
                num_workers=num_workers,
                micro=micro,
            )
            for index in range(num_processes)
        ]
        for step, parts in enumerate(zip(*map(batches_of, loaders), strict=True)):
            expect_same([batch for part in parts for batch in part], expected[step])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("augment", [PLAIN, EVERYTHING], ids=["plain", "everything"])
def test_an_epoch_of_photos_may_be_entered_at_any_step(
    augment: PhotoAugmentConfig, num_workers: int
) -> None:
    whole = batches_of(make_loader(global_batch=4, augment=augment), epoch=2)
    loader = make_loader(global_batch=4, augment=augment, num_workers=num_workers)
    for first_step in range(len(whole) + 1):
        rest = batches_of(loader, epoch=2, first_step=first_step)
        assert len(rest) == len(whole) - first_step
        for found, expected in zip(rest, whole[first_step:], strict=True):
            expect_same(found, expected)


def test_inputs_and_targets_are_as_models_expect_them() -> None:
    loader: Loader = make_loader()
    batch = next(loader.step_batches(0, 0)).micro_batches[0]
    assert batch.inputs.shape == (8, 3, SIZE, SIZE)
    assert batch.inputs.dtype == torch.float32
    assert batch.inputs.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(batch.targets, batch.sample_ids % 3)
    mixed = next(make_loader(augment=EVERYTHING).step_batches(0, 0)).micro_batches[0]
    assert mixed.targets.shape == (8, 3)
    torch.testing.assert_close(mixed.targets.sum(1), torch.ones(8))


@pytest.mark.parametrize("kind", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}])
def test_a_mix_is_made_of_two_augmented_photos(kind: dict[str, float]) -> None:
    plain = {i: (x, t) for step in batches_of(make_loader()) for i, x, t in rows_of(step)}
    config = PhotoAugmentConfig(**kind)
    for step in batches_of(make_loader(augment=config)):
        for sample, image, target in rows_of(step):
            ids = torch.tensor([sample])
            partner = int(draw_partners(ids, num_samples=21, seed=5, epoch=1))
            pixels, weight = draw_mix(config, ids, height=SIZE, width=SIZE, seed=5, epoch=1)
            expected = pixels[0] * plain[sample][0] + (1 - pixels[0]) * plain[partner][0]
            torch.testing.assert_close(image, expected, rtol=1e-5, atol=1e-5)
            wanted = torch.zeros(3)
            wanted[sample % 3] += weight[0]
            wanted[partner % 3] += 1 - weight[0]
            torch.testing.assert_close(target, wanted)


def test_small_pictures_are_augmented_as_on_the_path_for_them() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 16, 16, 3), dtype=np.uint8)
    photos = split_of([encoded(Image.fromarray(image), "png") for image in pixels])
    transform = EvalTransform(size=16, crop_ratio=1.0, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))
    images = ImageSplit(
        images=torch.from_numpy(pixels).permute(0, 3, 1, 2),
        labels=torch.from_numpy(photos.labels),
        num_classes=3,
    )
    normalization = Normalization(mean=transform.mean, std=transform.std)
    for options in (
        {},
        {"crop_mode": "zero", "flip": "alternating"},
        {"mixup": 0.3, "cutmix": 0.7},
    ):
        augment = PhotoAugmentConfig(crop="padded", crop_padding=3, **options)
        found = make_loader(photos=photos, transform=transform, augment=augment)
        reader = AugmentedImageReader(
            images,
            normalization=normalization,
            device=CPU,
            augment=AugmentConfig(crop_padding=3, **options),
            seed=5,
        )
        expected = TrainLoader(reader, found.plan, seed=5, device=CPU)
        for left, right in zip(found.step_batches(3, 0), expected.step_batches(3, 0), strict=True):
            expect_same(list(left.micro_batches), list(right.micro_batches))
    evaluated, reference = (
        EvalLoader(reader, batch_size=7, device=CPU)
        for reader in (
            PhotoReader(photos, transform=transform, device=CPU),
            ImageReader(images, normalization=normalization, device=CPU),
        )
    )
    expect_same(list(evaluated.batches()), list(reference.batches()))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_processes", [1, 3, 25])
def test_an_evaluation_is_every_photo_once_through_the_transform(
    num_processes: int, num_workers: int
) -> None:
    photos = split_of(mixed_photos(21))
    seen = []
    for index in range(num_processes):
        loader: EvalSource = EvalLoader(
            PhotoReader(photos, transform=TRANSFORM, device=CPU, num_workers=num_workers),
            batch_size=4,
            device=CPU,
            num_processes=num_processes,
            process_index=index,
        )
        assert loader.num_samples == 21
        seen += rows_of(list(loader.batches()))
    assert [sample for sample, _, _ in seen] == list(range(21))
    for sample, image, target in seen:
        pixels = TRANSFORM(photos.encoded_at(sample), "a")
        assert torch.equal(image, TRANSFORM.normalize(pixels[None])[0])
        assert target == sample % 3


def test_a_reader_that_augments_evaluates_plain_photos() -> None:
    photos = split_of(mixed_photos(21))
    readers = [
        PhotoReader(photos, transform=TRANSFORM, device=CPU),
        AugmentedPhotoReader(
            photos, transform=TRANSFORM, device=CPU, augment=EVERYTHING, num_classes=3, seed=5
        ),
    ]
    plain, augmented = (EvalLoader(each, batch_size=9, device=CPU).batches() for each in readers)
    expect_same(list(augmented), list(plain))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_photo_that_cannot_be_decoded_is_named_and_the_threads_end(num_workers: int) -> None:
    photos = list(mixed_photos(21))
    photos[13] = photos[13][:100]
    loader = make_loader(photos=split_of(photos), num_workers=num_workers, global_batch=21)
    with pytest.raises(DataError, match="photo 13 cannot be decoded"):
        batches_of(loader)
    assert not reading_threads()


def reading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("photos")]


def test_the_threads_end_when_an_epoch_is_left_early() -> None:
    steps = make_loader(num_workers=2, global_batch=1).step_batches(0, 0)
    next(steps)
    assert len(list(next(steps).micro_batches)) == 1
    assert reading_threads()
    steps.close()
    assert not reading_threads()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_few_photos_are_read_ahead(num_workers: int) -> None:
    photos, read = mixed_photos(21), []

    def encoded_at(index: int) -> bytes:
        read.append(index)
        return photos[index]

    split = PhotoSplit(labels=np.zeros(21, np.int64), encoded_at=encoded_at, name_of=str)
    steps = make_loader(photos=split, num_workers=num_workers, global_batch=2).step_batches(0, 0)
    for step in range(1, 8):
        assert len(next(steps).micro_batches[0]) == 2
        assert len(read) <= 2 * step + (4 if num_workers else 0)
    steps.close()


def test_a_micro_batch_can_be_read_again() -> None:
    steps = make_loader(micro=3, augment=EVERYTHING, num_workers=2).step_batches(0, 0)
    micro_batches = next(steps).micro_batches
    assert len(micro_batches) == 3
    expect_same([micro_batches[1], micro_batches[0]], [micro_batches[1], micro_batches[0]])
    steps.close()


def test_a_padding_as_large_as_the_photo_is_refused() -> None:
    with pytest.raises(ConfigError, match="--augment.crop-padding 15 is too much for 15 pixels"):
        make_loader(augment=PhotoAugmentConfig(crop="padded", crop_padding=15))


class Jitter:
    """A callable of a user's, which draws from global generators."""

    def __call__(self, image: Image.Image) -> torch.Tensor:
        pixels = torch.from_numpy(np.array(image.resize((SIZE, SIZE)))).permute(2, 0, 1) / 255
        return pixels * torch.rand(()) + random.random() + np.random.rand()


def test_a_users_own_callable_gives_the_same_pixels_anywhere() -> None:
    dataset = PhotoDataset(split_of(mixed_photos(21)), Jitter())

    def batches(num_workers: int, first_step: int = 0) -> list[list[Batch]]:
        loader = build_train_loader(
            dataset,
            BatchConfig(per_device_batch_size=8, num_workers=num_workers),
            seed=0,
            accelerator=Accelerator(cpu=True),
            options=DatasetOptions(num_classes=3),
        )
        return [list(step.micro_batches) for step in loader.step_batches(0, first_step)]

    whole = batches(0)
    assert whole[0][0].inputs.shape == (8, 3, SIZE, SIZE)
    for found in (batches(2), [whole[0], *batches(0, 1)]):
        for left, right in zip(found, whole, strict=True):
            expect_same(left, right)


def test_this_thread_keeps_its_number_of_threads(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    processes.run(read_with_three_threads, folder=tmp_path)


def read_with_three_threads() -> None:
    torch.set_num_threads(3)
    batches_of(make_loader(num_workers=2))
    assert torch.get_num_threads() == 3
