from __future__ import annotations

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from accel_trainer.core.errors import ConfigError
from accel_trainer.vision.data.eval_transform import Box, EvalTransform, resize_box
from accel_trainer.vision.data.photo_decode import decode_photo

from .make_photos import encoded, photo


def test_the_centre_square_is_resized() -> None:
    transform = EvalTransform(size=32, crop_ratio=0.8)
    assert transform.box(100, 200) == Box(10, 60, 80, 80)
    assert transform.box(1, 5000) == Box(0, 2499, 1, 1)
    data = encoded(photo(60, 45), "png")
    image = Image.open(io.BytesIO(data))
    box = transform.box(45, 60)
    place = (box.left, box.top, box.left + box.width, box.top + box.height)
    expected = np.array(image.crop(place).resize((32, 32), Image.Resampling.BILINEAR))
    found = transform(data, "a")
    assert found.dtype == torch.uint8
    assert found.shape == (32, 32, 3)
    # Both are antialiased with the same filter; they round differently.
    assert np.abs(found.numpy().astype(int) - expected).max() <= 1


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_crop_is_resized_as_if_it_were_a_whole_picture(interpolation: str) -> None:
    pixels = decode_photo(encoded(photo(90, 70)), "a")
    box = Box(11, 7, 50, 33)
    part = pixels[11:61, 7:40].copy()
    whole = resize_box(part, Box(0, 0, 50, 33), 24, interpolation)
    assert torch.equal(resize_box(pixels, box, 24, interpolation), whole)


@pytest.mark.parametrize(
    ("side", "expected"), [(63, 1), (64, 2), (127, 2), (128, 4), (256, 8), (2000, 8)]
)
def test_a_large_jpeg_is_decoded_at_a_fraction_of_its_size(
    side: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrinks = []

    def recorded(data: bytes, name: str, **options: object) -> np.ndarray:
        shrinks.append(options["shrink"])
        return decode_photo(data, name, **options)

    monkeypatch.setattr("accel_trainer.vision.data.eval_transform.decode_photo", recorded)
    data = encoded(photo(side + 30, side))
    found = EvalTransform(size=32, crop_ratio=1.0)(data, "a").float()
    assert shrinks == [expected]
    whole = resize_box(decode_photo(data, "a"), Box(0, 15, side, side), 32).float()
    assert (found - whole).abs().mean() < 5, "nearly the same picture"


def test_a_png_is_never_shrunk() -> None:
    data = encoded(photo(200, 150), "png")
    assert torch.equal(
        EvalTransform(size=16, crop_ratio=1.0)(data, "a"),
        resize_box(decode_photo(data, "a"), Box(0, 25, 150, 150), 16),
    )


def test_pixels_are_normalised_channel_by_channel() -> None:
    transform = EvalTransform(size=2, mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 1.0))
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).expand(1, 2, 2, 3)
    images = transform.normalize(pixels)
    assert images.shape == (1, 3, 2, 2)
    assert images.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(images[0, :, 0, 0], torch.tensor([-1.0, -0.2, 1.0]))


def test_it_is_stored_as_json() -> None:
    transform = EvalTransform(size=96, crop_ratio=0.9, interpolation="bicubic")
    assert EvalTransform.from_dict(json.loads(json.dumps(transform.to_dict()))) == transform
    for wrong in ({}, {"size": 3}, {**transform.to_dict(), "more": 1}):
        with pytest.raises(ConfigError, match="not an evaluation transform"):
            EvalTransform.from_dict(wrong)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 0}, "--image-size is 0: set it to 1 to 16384 pixels"),
        ({"size": 8, "crop_ratio": 0.0}, "the crop ratio is 0.0: set it above 0 and at most 1"),
        ({"size": 8, "crop_ratio": 1.1}, "the crop ratio is 1.1"),
        ({"size": 8, "std": (1.0, 0.0, 1.0)}, "std above 0"),
        ({"size": 8, "interpolation": "nearest"}, "'nearest': set it to bilinear or bicubic"),
    ],
)
def test_a_wrong_value_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvalTransform(**values)
