"""Each augmentation of photos against a slow, obvious version."""

from __future__ import annotations

import colorsys
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from accel_trainer.core.errors import ConfigError
from accel_trainer.core.rng import fold_in
from accel_trainer.vision.augment.draws import random_uniform
from accel_trainer.vision.augment.photo import (
    Draw,
    PhotoAugment,
    PhotoAugmentConfig,
    PhotoDraws,
    random_resized_box,
)
from accel_trainer.vision.augment.photo_ops import OPERATIONS, jitter_colors, operate
from accel_trainer.vision.data.eval_transform import Box

from .make_photos import decoded, encoded, photo

IDS = torch.arange(4000)
FILL = (1, 2, 3)
Pixels = NDArray[np.uint8]


def augment(size: int = 16, *, epoch: int = 0, seed: int = 0, **options: Any) -> PhotoAugment:
    return PhotoAugment(
        PhotoAugmentConfig(**options), size=size, mean=(0.2, 0.4, 0.6), seed=seed, epoch=epoch
    )


def uniform(draw: int, sample: int, *, seed: int = 0, epoch: int = 0) -> float:
    return float(random_uniform(fold_in(seed, epoch), torch.tensor([sample]), draw))


def draws_with(numbers: dict[int, float]) -> PhotoDraws:
    table = [0.0] * (Draw.END - Draw.CROP_AREA)
    for draw, number in numbers.items():
        table[draw - Draw.CROP_AREA] = number
    return PhotoDraws(uniform=table, row=0, column=0, is_flipped=False)


def small(seed: int = 0) -> Pixels:
    return np.array(photo(9, 7, seed=seed))


# --- crops ---


def obvious_crop(height: int, width: int, sample: int) -> Box:
    """As torchvision's RandomResizedCrop chooses its box."""
    for attempt in range(10):
        area = (0.08 + 0.92 * uniform(Draw.CROP_AREA + attempt, sample)) * height * width
        low, high = math.log(3 / 4), math.log(4 / 3)
        aspect = math.exp(low + (high - low) * uniform(Draw.CROP_SHAPE + attempt, sample))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = int(uniform(Draw.CROP_TOP, sample) * (height - h + 1))
            left = int(uniform(Draw.CROP_LEFT, sample) * (width - w + 1))
            return Box(top, left, h, w)
    if width / height < 3 / 4:
        w, h = width, round(width / (3 / 4))
    elif width / height > 4 / 3:
        w, h = round(height * (4 / 3)), height
    else:
        w, h = width, height
    return Box((height - h) // 2, (width - w) // 2, h, w)


@pytest.mark.parametrize(
    ("height", "width"), [(375, 500), (30, 20), (200, 10), (1, 300), (1, 1), (7, 2000)]
)
def test_random_resized_boxes_are_those_of_the_obvious_algorithm(height: int, width: int) -> None:
    draws = augment().draw(IDS[:300])
    for sample in range(300):
        box = random_resized_box(
            height, width, scale=(0.08, 1.0), shape=(3 / 4, 4 / 3), draws=draws[sample]
        )
        assert box == obvious_crop(height, width, sample)
        assert box.top >= 0
        assert box.top + box.height <= height
        assert box.left >= 0
        assert box.left + box.width <= width


def test_a_random_resized_crop_is_that_box_resized() -> None:
    data = encoded(photo(60, 50), "png")
    image = Image.fromarray(decoded(data))
    for sample, draws in enumerate(augment().draw(IDS[:40])):
        box = obvious_crop(50, 60, sample)
        place = (box.left, box.top, box.left + box.width, box.top + box.height)
        expected = np.array(image.crop(place).resize((16, 16), Image.Resampling.BILINEAR)).astype(
            int
        )
        if draws.is_flipped:
            expected = expected[:, ::-1]
        found = augment()(data, "a", draws).numpy()
        assert np.abs(found - expected).max() <= 1


def test_areas_of_crops_are_uniform() -> None:
    scale = (0.25, 0.75)
    areas = []
    for draws in augment(crop_scale=scale).draw(IDS):
        box = random_resized_box(1000, 1000, scale=scale, shape=(0.8, 1.25), draws=draws)
        areas.append(box.height * box.width / 1e6)
    assert min(areas) > 0.249
    assert max(areas) < 0.751
    assert abs(np.mean(areas) - 0.5) < 0.01


@pytest.mark.parametrize("mode", ["reflect", "zero"])
def test_a_padded_crop_moves_the_centre_square(mode: str) -> None:
    data = encoded(photo(24, 16), "png")
    square = decoded(data)[:, 4:20]
    padded = np.pad(
        square, ((3, 3), (3, 3), (0, 0)), mode="reflect" if mode == "reflect" else "constant"
    )
    shifts = set()
    options = {"crop": "padded", "crop_padding": 3, "crop_mode": mode, "flip": "none"}
    for draws in augment(**options).draw(IDS[:200]):
        expected = padded[draws.row : draws.row + 16, draws.column : draws.column + 16]
        assert np.array_equal(augment(**options)(data, "a", draws).numpy(), expected)
        shifts.add((draws.row, draws.column))
    assert len(shifts) > 40


def test_without_a_crop_the_centre_square_is_resized() -> None:
    data = encoded(photo(24, 16), "png")
    draws = augment(crop="none", flip="none").draw(IDS[:1])[0]
    assert np.array_equal(
        augment(crop="none", flip="none")(data, "a", draws).numpy(), decoded(data)[:, 4:20]
    )


def test_alternating_flips_change_sides_each_epoch() -> None:
    data = encoded(photo(16, 16), "png")
    options = {"crop": "none", "flip": "alternating"}
    pixels = [augment(epoch=epoch, **options) for epoch in (0, 1)]
    for first, second in zip(*(each.draw(IDS[:20]) for each in pixels), strict=True):
        left, right = pixels[0](data, "a", first).numpy(), pixels[1](data, "a", second).numpy()
        assert np.array_equal(left[:, ::-1], right)


# --- colours ---


def test_colors_are_jittered_as_computed_pixel_by_pixel() -> None:
    pixels = small()
    floats = pixels.astype(float)
    grey = np.array(Image.fromarray(pixels).convert("L")).astype(float)[..., None]
    for number in (0.0, 0.3, 0.5, 0.9):
        change = 0.8 * (2 * number - 1)
        expected = {
            0: floats * (1 + change),
            1: int(grey.mean() + 0.5) + (floats - int(grey.mean() + 0.5)) * (1 + change),
            2: grey + (floats - grey) * (1 + change),
        }
        for which, wanted in expected.items():
            most = [0.0] * 4
            most[which] = 0.8
            uniforms = [0.0] * 5
            uniforms[1 + which] = number
            found = jitter_colors(pixels, most, uniforms)
            assert np.abs(found - np.clip(wanted, 0, 255)).max() <= 1.0


def test_the_hue_is_turned_as_computed_pixel_by_pixel() -> None:
    pixels = small(1)
    found = jitter_colors(pixels, (0, 0, 0, 0.5), (0, 0, 0, 0, 0.7)).astype(int)
    for row, column in np.ndindex(pixels.shape[:2]):
        hue, saturation, value = colorsys.rgb_to_hsv(*(pixels[row, column] / 255))
        expected = np.array(colorsys.hsv_to_rgb((hue + 0.2) % 1, saturation, value)) * 255
        assert np.abs(found[row, column] - expected).max() <= 5, (
            "Pillow stores hue and saturation in 8 bits"
        )


def test_the_order_of_the_jitter_is_random() -> None:
    pixels = small()
    results = {
        jitter_colors(pixels, (0.9, 0.9, 0.9, 0.4), (order / 24, 0.9, 0.1, 0.8, 0.9)).tobytes()
        for order in range(24)
    }
    assert len(results) > 6
    assert np.array_equal(jitter_colors(pixels, (0, 0, 0, 0), (0.5,) * 5), pixels)


# --- operations of the policies ---


def apply(
    operation: str, strength: float = 0.5, *, is_negative: bool = False
) -> tuple[Pixels, Pixels]:
    pixels = small(1)
    return pixels, operate(pixels, operation, strength=strength, is_negative=is_negative, fill=FILL)


def test_there_are_the_14_operations_of_randaugment() -> None:
    assert len(OPERATIONS) == 14
    for operation in OPERATIONS:
        pixels, found = apply(operation)
        assert found.shape == pixels.shape
        assert found.dtype == np.uint8
    assert np.array_equal(*apply("identity"))


def obvious_move(pixels: Pixels, source: Any) -> Pixels:
    """Each output pixel is that of the input at `source(x, y)`, the centres of pixels at .5."""
    moved = np.empty_like(pixels)
    for y, x in np.ndindex(pixels.shape[:2]):
        from_x, from_y = (math.floor(place) for place in source(x + 0.5, y + 0.5))
        is_inside = 0 <= from_x < pixels.shape[1] and 0 <= from_y < pixels.shape[0]
        moved[y, x] = pixels[from_y, from_x] if is_inside else FILL
    return moved


@pytest.mark.parametrize("is_negative", [False, True])
@pytest.mark.parametrize("strength", [0.0, 0.4, 1.0])
def test_moves_take_the_nearest_pixel(strength: float, is_negative: bool) -> None:
    sign = -1 if is_negative else 1
    shear = 0.3 * strength * sign
    sources = {
        "shear_x": lambda x, y: (x + shear * y, y),
        "shear_y": lambda x, y: (x, y + shear * x),
        "translate_x": lambda x, y: (x + int(150 / 331 * strength * 9 * sign), y),
        "translate_y": lambda x, y: (x, y + int(150 / 331 * strength * 7 * sign)),
    }
    for operation, source in sources.items():
        pixels, found = apply(operation, strength, is_negative=is_negative)
        assert np.array_equal(found, obvious_move(pixels, source)), operation


def test_a_rotation_is_counterclockwise_about_the_centre() -> None:
    pixels, found = apply("rotate", 1.0)
    angle = math.radians(30)

    def source(x: float, y: float) -> tuple[float, float]:
        dx, dy = x - 4.5, y - 3.5
        return 4.5 + math.cos(angle) * dx - math.sin(angle) * dy, 3.5 + math.sin(
            angle
        ) * dx + math.cos(angle) * dy

    assert np.array_equal(found, obvious_move(pixels, source))
    assert not np.array_equal(apply("rotate", 1.0, is_negative=True)[1], found)


@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
def test_bits_and_thresholds(strength: float) -> None:
    pixels, found = apply("posterize", strength)
    bits = 8 - round(4 * strength)
    assert np.array_equal(found, (pixels >> (8 - bits)) << (8 - bits))
    pixels, found = apply("solarize", strength)
    limit = round(256 * (1 - strength))
    assert np.array_equal(found, np.where(pixels < limit, pixels, 255 - pixels))


def test_contrast_and_histograms() -> None:
    pixels, found = apply("autocontrast")
    low, high = pixels.min((0, 1)).astype(float), pixels.max((0, 1)).astype(float)
    assert np.abs(found - (pixels - low) * 255 / (high - low)).max() <= 1
    pixels, found = apply("equalize")
    assert np.array_equal(found, pixels), "too few pixels for 256 values"
    many = np.array(photo(100, 80))
    spread = operate(many, "equalize", strength=0, is_negative=False, fill=FILL)
    for channel in range(3):
        quarters = (
            np.histogram(spread[..., channel], bins=4, range=(0, 256))[0]
            / spread[..., channel].size
        )
        assert (np.abs(quarters - 0.25) < 0.1).all()


@pytest.mark.parametrize("operation", ["brightness", "color", "contrast", "sharpness"])
def test_enhancements_go_both_ways(operation: str) -> None:
    pixels, more = apply(operation, 1.0)
    _, less = apply(operation, 1.0, is_negative=True)
    assert np.array_equal(apply(operation, 0.0)[1], pixels)
    assert more.astype(float).std() > less.astype(float).std()


def test_randaugment_applies_operations_one_after_the_other() -> None:
    data = encoded(photo(16, 16), "png")
    options = {
        "crop": "none",
        "flip": "none",
        "policy": "randaugment",
        "num_operations": 3,
        "magnitude": 12,
    }
    for sample, draws in enumerate(augment(**options).draw(IDS[:60])):
        pixels = decoded(data)
        for place in range(3):
            operation = OPERATIONS[int(uniform(Draw.OPERATION + place, sample) * 14)]
            is_negative = uniform(Draw.SIGN + place, sample) < 0.5
            pixels = operate(
                pixels, operation, strength=0.4, is_negative=is_negative, fill=(51, 102, 153)
            )
        assert np.array_equal(augment(**options)(data, "a", draws).numpy(), pixels)


def test_trivialaugment_applies_one_operation_of_any_strength() -> None:
    data = encoded(photo(16, 16), "png")
    options = {"crop": "none", "flip": "none", "policy": "trivialaugment"}
    strengths = set()
    for sample, draws in enumerate(augment(**options).draw(IDS[:60])):
        strength = int(uniform(Draw.STRENGTH, sample) * 31) / 30
        operation = OPERATIONS[int(uniform(Draw.OPERATION, sample) * 14)]
        is_negative = uniform(Draw.SIGN, sample) < 0.5
        pixels = operate(
            decoded(data),
            operation,
            strength=strength,
            is_negative=is_negative,
            fill=(51, 102, 153),
        )
        assert np.array_equal(augment(**options)(data, "a", draws).numpy(), pixels)
        strengths.add(strength)
    assert len(strengths) > 20
    assert max(strengths) <= 1


# --- erasing ---


def test_a_random_box_is_erased_with_the_given_probability() -> None:
    data = encoded(Image.new("RGB", (32, 32), "white"), "png")
    options = {"crop": "none", "flip": "none", "erase": 0.25}
    fractions = []
    for sample, draws in enumerate(augment(32, **options).draw(IDS)):
        is_chosen = uniform(Draw.ERASE, sample) < 0.25
        if sample < 400:
            pixels = augment(32, **options)(data, "a", draws).numpy()
            is_erased = (pixels == (51, 102, 153)).all(2)
            assert is_erased.any() == is_chosen
            assert ((pixels == 255).all(2) | is_erased).all()
            rows, columns = is_erased.any(1).sum(), is_erased.any(0).sum()
            assert is_erased.sum() == rows * columns, "one rectangle"
            if is_chosen:
                fractions.append(is_erased.mean())
    assert min(fractions) > 0.01
    assert max(fractions) < 0.36
    chosen = sum(uniform(Draw.ERASE, sample) < 0.25 for sample in range(1000))
    assert 200 < chosen < 300


# --- draws and config ---


def test_draws_for_a_sample_do_not_depend_on_its_batch() -> None:
    options = {"policy": "randaugment", "erase": 0.5, "color_jitter": (0.1, 0.1, 0.1, 0.1)}
    everyone, some = augment(**options).draw(IDS), [17, 3, 3, 3999]
    assert augment(**options).draw(torch.tensor(some)) == [everyone[sample] for sample in some]
    for other in (augment(seed=1, **options), augment(epoch=1, **options)):
        for mine, theirs in zip(everyone, other.draw(IDS[:5]), strict=False):
            assert mine.uniform != theirs.uniform
    assert augment(**options).draw(IDS[:0]) == []


def test_every_draw_has_a_number_of_its_own() -> None:
    options = {"policy": "trivialaugment", "erase": 0.5, "color_jitter": (0.1, 0.1, 0.1, 0.1)}
    table = np.array([draws.uniform for draws in augment(**options).draw(IDS)])
    assert ((table >= 0) & (table < 1)).all()
    assert len({tuple(column) for column in table.T}) == table.shape[1]
    correlations = np.corrcoef(table.T) - np.eye(table.shape[1])
    assert np.abs(correlations).max() < 0.08


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"crop_scale": (0.0, 1.0)}, "augment.crop_scale is (0.0, 1.0): set it above 0"),
        ({"crop_scale": (0.5, 1.5)}, "augment.crop_scale is (0.5, 1.5): set it between 0 and 1"),
        ({"crop_scale": (0.9, 0.1)}, "--augment.crop-scale is 0.9 0.1: give the smaller number"),
        ({"crop_shape": (-1.0, 1.0)}, "augment.crop_shape is (-1.0, 1.0): set it above 0"),
        ({"crop_padding": -1}, "augment.crop_padding is -1: set it to at least 0"),
        ({"color_jitter": (0.1, 0.1, 0.1, 0.6)}, "the hue of --augment.color-jitter is 0.6: set"),
        ({"color_jitter": (-0.1, 0.1, 0.1, 0.1)}, "augment.color_jitter is (-0.1, 0.1, 0.1, 0.1)"),
        ({"num_operations": 0}, "augment.num_operations is 0: set it to 1 .. 10"),
        ({"magnitude": 31}, "augment.magnitude is 31: set it to 0 .. 30"),
        ({"erase": 1.1}, "augment.erase is 1.1: set it between 0 and 1"),
        ({"mixup": -1.0}, "augment.mixup is -1.0: set it to at least 0"),
        ({"cutmix": math.inf}, "augment.cutmix is inf"),
    ],
)
def test_a_wrong_value_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        PhotoAugmentConfig(**values)
    assert message in str(error.value)
