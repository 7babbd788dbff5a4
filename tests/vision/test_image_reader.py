from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from accel_trainer.core.batch_plan import BatchPlan
from accel_trainer.core.errors import ConfigError
from accel_trainer.core.types import Batch, EvalSource, Loader
from accel_trainer.data.loader import EvalLoader, TrainLoader
from accel_trainer.vision import AugmentConfig, AugmentedImageReader, ImageReader

from .make_data import NORMALIZATION, random_split

CPU = torch.device("cpu")
PLAIN = AugmentConfig(crop_padding=2)
MIXED = AugmentConfig(cutout=2, mixup=0.5, cutmix=1.0)


def make_loader(
    *,
    num_samples: int = 24,
    global_batch: int = 12,
    num_processes: int = 1,
    micro: int = 64,
    process_index: int = 0,
    augment: AugmentConfig = PLAIN,
    seed: int = 0,
) -> TrainLoader[AugmentedImageReader]:
    plan = BatchPlan(
        num_samples=num_samples,
        global_batch_size=global_batch,
        per_device_batch_size=micro,
        num_processes=num_processes,
    )
    return train_loader(plan, process_index=process_index, augment=augment, seed=seed, device=CPU)


def train_loader(
    plan: BatchPlan,
    *,
    augment: AugmentConfig,
    device: torch.device,
    seed: int = 0,
    process_index: int = 0,
) -> TrainLoader[AugmentedImageReader]:
    reader = AugmentedImageReader(
        random_split(plan.num_samples),
        normalization=NORMALIZATION,
        device=device,
        augment=augment,
        seed=seed,
    )
    return TrainLoader(reader, plan, seed=seed, device=device, process_index=process_index)


def batches_of(loader: TrainLoader[AugmentedImageReader], *, epoch: int = 0) -> list[list[Batch]]:
    return [list(step_batch.micro_batches) for step_batch in loader.step_batches(epoch, 0)]


def by_sample(batches: list[Batch]) -> dict[int, tuple[Tensor, Tensor]]:
    return {
        sample: (batch.inputs[row], batch.targets[row])
        for batch in batches
        for row, sample in enumerate(batch.sample_ids.tolist())
    }


@pytest.mark.parametrize("augment", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_each_step_has_the_same_pixels_and_targets_for_any_processes(
    augment: AugmentConfig,
) -> None:
    reference = batches_of(make_loader(num_samples=31, augment=augment), epoch=3)
    for num_processes, micro in ((2, 64), (3, 2), (4, 1)):
        shares = [
            batches_of(
                make_loader(
                    num_samples=31,
                    num_processes=num_processes,
                    micro=micro,
                    process_index=process_index,
                    augment=augment,
                ),
                epoch=3,
            )
            for process_index in range(num_processes)
        ]
        for step, expected in enumerate(reference):
            found = by_sample([batch for share in shares for batch in share[step]])
            wanted = by_sample(expected)
            assert found.keys() == wanted.keys()
            for sample, (image, target) in wanted.items():
                assert torch.equal(found[sample][0], image)
                assert torch.equal(found[sample][1], target)


@pytest.mark.parametrize("augment", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_a_process_without_samples_gets_an_empty_batch_of_the_right_shape(
    augment: AugmentConfig,
) -> None:
    loader = make_loader(num_samples=25, num_processes=4, process_index=3, augment=augment)
    (batch,) = batches_of(loader)[-1]
    assert batch.inputs.shape == (0, 3, 8, 8)
    assert batch.targets.shape == ((0, 10) if augment.mixes(0) else (0,))
    assert len(batch) == 0


def test_without_augmentation_batches_are_the_normalised_images() -> None:
    split = random_split(24)
    mean = torch.tensor(NORMALIZATION.mean)[:, None, None]
    std = torch.tensor(NORMALIZATION.std)[:, None, None]
    for batch in itertools.chain(
        *batches_of(make_loader(augment=AugmentConfig(crop_padding=0, flip="none")))
    ):
        expected = (split.images[batch.sample_ids].float() / 255 - mean) / std
        torch.testing.assert_close(batch.inputs, expected, rtol=0, atol=2e-6)
        assert torch.equal(batch.targets, split.labels[batch.sample_ids])


def test_mixed_targets_are_weights_that_sum_to_one_over_the_two_labels() -> None:
    for batch in itertools.chain(*batches_of(make_loader(augment=MIXED))):
        torch.testing.assert_close(batch.targets.sum(1), torch.ones(len(batch)))
        assert ((batch.targets > 0).sum(1) <= 2).all()
        own = batch.targets.gather(1, (batch.sample_ids % 10)[:, None])
        assert (own > 0).double().mean() > 0.9


def test_a_pasted_box_shows_the_partner_as_it_is_augmented_in_this_epoch() -> None:
    plain = by_sample(list(itertools.chain(*batches_of(make_loader(), epoch=2))))
    mixed = batches_of(make_loader(augment=AugmentConfig(crop_padding=2, cutmix=1.0)), epoch=2)
    pasted = 0
    for batch in itertools.chain(*mixed):
        for image, sample in zip(batch.inputs, batch.sample_ids.tolist(), strict=True):
            elsewhere = (image != plain[sample][0]).any(0)
            if elsewhere.sum() < 4:
                continue
            pasted += 1
            assert any(
                torch.equal(image[:, elsewhere], other[:, elsewhere]) for other, _ in plain.values()
            )
    assert pasted > 5


@pytest.mark.parametrize("augment", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_images_are_float32_with_channels_last_in_memory(augment: AugmentConfig) -> None:
    batch = batches_of(make_loader(augment=augment))[0][0]
    assert batch.inputs.is_contiguous(memory_format=torch.channels_last)
    assert batch.inputs.dtype == torch.float32


def test_padding_that_cannot_be_mirrored_or_is_all_of_a_crop_is_refused() -> None:
    with pytest.raises(ConfigError, match="crop-padding 8 is too much for images of 8 pixels"):
        make_loader(augment=AugmentConfig(crop_padding=8))
    make_loader(augment=AugmentConfig(crop_padding=8, crop_mode="zero"))
    with pytest.raises(ConfigError, match="crop-padding 1000000000 is too much for images of 8"):
        make_loader(augment=AugmentConfig(crop_padding=10**9, crop_mode="zero"))


def make_eval_loader(num_samples: int) -> EvalLoader[ImageReader]:
    reader = ImageReader(random_split(num_samples), normalization=NORMALIZATION, device=CPU)
    return EvalLoader(reader, batch_size=7, device=CPU)


def test_evaluation_images_are_training_images_without_augmentation() -> None:
    plain = AugmentConfig(crop_padding=0, flip="none")
    train = by_sample(list(itertools.chain(*batches_of(make_loader(augment=plain)))))
    loader = make_eval_loader(24)
    for sample, (image, _) in by_sample(list(loader.batches())).items():
        assert torch.equal(image, train[sample][0])


def test_the_loaders_keep_the_engines_protocols() -> None:
    loader: Loader = make_loader()
    evaluation: EvalSource = make_eval_loader(3)
    assert loader.plan.num_samples == 24
    assert evaluation.num_samples == 3


@pytest.mark.gpu
@pytest.mark.parametrize("augment", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_a_gpu_gets_the_pixels_of_the_cpu_and_waits_for_none(augment: AugmentConfig) -> None:
    plan = BatchPlan(num_samples=31, global_batch_size=12, per_device_batch_size=5)
    loaders = [
        train_loader(plan, augment=augment, device=device) for device in (CPU, torch.device("cuda"))
    ]
    for expected, step_batch in zip(
        loaders[0].step_batches(1, 0), loaders[1].step_batches(1, 0), strict=True
    ):
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = list(step_batch.micro_batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for left, right in zip(expected.micro_batches, found, strict=True):
            torch.testing.assert_close(right.inputs.cpu(), left.inputs, rtol=0, atol=1e-5)
            torch.testing.assert_close(right.targets.cpu(), left.targets)
            assert torch.equal(right.sample_ids.cpu(), left.sample_ids)


def test_a_reader_that_augments_evaluates_plain_images() -> None:
    options = {"normalization": NORMALIZATION, "device": CPU}
    readers = [
        ImageReader(random_split(24), **options),
        AugmentedImageReader(random_split(24), augment=MIXED, seed=0, **options),
    ]
    plain, augmented = (EvalLoader(each, batch_size=9, device=CPU).batches() for each in readers)
    for expected, found in zip(plain, augmented, strict=True):
        assert torch.equal(found.inputs, expected.inputs)
        assert torch.equal(found.targets, expected.targets)
