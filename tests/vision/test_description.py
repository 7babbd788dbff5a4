"""What a run says about its classes and its augmentation."""

from __future__ import annotations

import pytest

from accel_trainer.vision import AugmentConfig, PhotoAugmentConfig
from accel_trainer.vision.data.description import describe


@pytest.mark.parametrize(
    ("augment", "said"),
    [
        (AugmentConfig(crop_padding=0, flip="none"), "none"),
        (AugmentConfig(cutout=8), "crop moved by up to 4 pixels, cutout of 8 pixels, random flips"),
        (PhotoAugmentConfig(), "random-resized crop, random flips"),
        (
            PhotoAugmentConfig(crop="none", policy="randaugment", erase=0.25, mixup=0.2),
            "randaugment, erasing with probability 0.25, random flips, mixup 0.2",
        ),
    ],
)
def test_a_description_names_what_is_augmented(
    augment: AugmentConfig | PhotoAugmentConfig, said: str
) -> None:
    described = describe(["cat", "dog"], augment, source="photos/2024")
    assert described == f"2 classes (cat, dog) from photos/2024, augmentation: {said}"


def test_a_description_names_few_classes_and_shows_no_control_characters() -> None:
    names = ["a\x1b[31m", "b", "c", "d", "e"]
    said = describe(names, AugmentConfig(), source="p\x07")
    assert said.startswith(r"5 classes ('a\x1b[31m', b, c, d, ...) from 'p\x07', ")


def test_a_description_names_no_data_that_the_config_does_not() -> None:
    described = describe(["a"], AugmentConfig(crop_padding=0, flip="none"), source=None)
    assert described == "1 class (a), augmentation: none"
