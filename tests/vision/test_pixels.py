from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from accel_trainer.vision.augment.batch import AugmentConfig, Placement, draw_placement
from accel_trainer.vision.data.pixels import CropMode, crop_by_copy, crop_by_gather, normalize


def crop_one_by_one(
    images: Tensor, ids: Tensor, placement: Placement, *, padding: int, mode: CropMode
) -> Tensor:
    """The same by the book: pad, crop, flip each image."""
    height, width, crops = *images.shape[1:3], []
    for position, sample in enumerate(ids.tolist()):
        border = ((padding, padding), (padding, padding), (0, 0))
        padded = np.pad(
            images[sample].numpy(), border, mode="reflect" if mode == "reflect" else "constant"
        )
        row, column = int(placement.rows[position]), int(placement.columns[position])
        image = padded[row : row + height, column : column + width]
        is_flipped = placement.flips is not None and bool(placement.flips[position])
        crops.append(torch.from_numpy((image[:, ::-1] if is_flipped else image).copy()))
    return torch.stack(crops)


@pytest.mark.parametrize("mode", ["reflect", "zero"])
@pytest.mark.parametrize("padding", [0, 1, 3, 4])
@pytest.mark.parametrize("flip", ["none", "random"])
@pytest.mark.parametrize("channels", [1, 3])
def test_both_ways_to_crop_equal_padding_cropping_and_flipping_one_by_one(
    mode: CropMode, padding: int, flip: str, channels: int
) -> None:
    images = torch.randint(1, 256, (20, 5, 7, channels), dtype=torch.uint8)
    ids = torch.randint(0, 20, (64,))
    config = AugmentConfig(crop_padding=padding, flip=flip)  # type: ignore[arg-type]
    placement = draw_placement(config, torch.arange(64), seed=3, epoch=1)
    expected = crop_one_by_one(images, ids, placement, padding=padding, mode=mode)
    assert torch.equal(crop_by_copy(images, ids, placement, padding=padding, mode=mode), expected)
    assert torch.equal(crop_by_gather(images, ids, placement, padding=padding, mode=mode), expected)


@pytest.mark.parametrize("mode", ["reflect", "zero"])
def test_every_crop_and_flip_of_an_image_is_right_at_the_corners(mode: CropMode) -> None:
    images = torch.randint(1, 256, (1, 4, 4, 3), dtype=torch.uint8)
    places = torch.tensor(list(itertools.product(range(7), range(7), (0, 1))))
    placement = Placement(places[:, 0], places[:, 1], places[:, 2] == 1)
    ids = torch.zeros(len(places), dtype=torch.int64)
    expected = crop_one_by_one(images, ids, placement, padding=3, mode=mode)
    assert torch.equal(crop_by_copy(images, ids, placement, padding=3, mode=mode), expected)
    assert torch.equal(crop_by_gather(images, ids, placement, padding=3, mode=mode), expected)


@pytest.mark.parametrize("crop", [crop_by_copy, crop_by_gather])
@pytest.mark.parametrize("padding", [0, 2])
def test_no_samples_make_an_empty_batch_of_the_right_shape(crop: object, padding: int) -> None:
    images, none = torch.zeros(3, 8, 8, 3, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
    crops = crop(images, none, Placement(none, none, none == 1), padding=padding, mode="reflect")  # type: ignore[operator]
    assert crops.shape == (0, 8, 8, 3)
    assert normalize(crops, torch.ones(192), torch.zeros(192)).shape == (0, 8, 8, 3)


def test_normalised_training_pixels_have_mean_0_and_deviation_1() -> None:
    pixels = torch.randint(0, 256, (50, 8, 8, 3), dtype=torch.uint8)
    values = pixels.double() / 255
    mean, std = values.mean((0, 1, 2)), values.std((0, 1, 2), correction=0)
    result = normalize(
        pixels, (1 / (255 * std)).float().repeat(64), (-mean / std).float().repeat(64)
    )
    torch.testing.assert_close(result.double(), (values - mean) / std, rtol=0, atol=1e-6)
