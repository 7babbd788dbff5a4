from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from accel_trainer.core.errors import ConfigError
from accel_trainer.vision import (
    ImageDataset,
    ImageSplit,
    ModelConfig,
    Normalization,
    build_model,
    whiten,
)
from accel_trainer.vision.models.whitening import patch_products


def smooth_images(size: int, num: int = 600) -> ImageDataset:
    """Images whose neighbouring pixels resemble each other, as those of photographs do."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(num, 3, size + 1, size + 1, generator=generator)
    pixels = (
        noise[..., :-1, :-1] + noise[..., 1:, 1:] + noise.mean(1, keepdim=True)[..., 1:, 1:]
    ) / 3
    images = (pixels * 255).to(torch.uint8).contiguous(memory_format=torch.channels_last)
    split = ImageSplit(images=images, labels=torch.arange(num) % 2, num_classes=2)
    scaled = images.double() / 255
    mean, std = scaled.mean((0, 2, 3)).tolist(), scaled.std((0, 2, 3)).tolist()
    return ImageDataset(
        train=split,
        test=split,
        class_names=("a", "b"),
        fingerprint="",
        normalization=Normalization(mean=tuple(mean), std=tuple(std)),
    )


def model_of(name: str = "airbench94") -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model(ModelConfig(name=name, width=8), in_channels=3, num_classes=10)


def test_the_first_features_of_a_whitened_network_are_uncorrelated() -> None:
    images = smooth_images(32)
    model = whiten(model_of(), images)
    mean, std = (
        torch.tensor(v)[:, None, None]
        for v in (images.normalization.mean, images.normalization.std)
    )
    features = model.stem((images.train.images / 255 - mean) / std)
    half = features.shape[1] // 2
    products = (
        torch.einsum("nchw,ndhw->cd", features[:, :half], features[:, :half])
        / features[:, 0].numel()
    )
    # Directions that are almost noise are kept below 1 by the epsilon.
    torch.testing.assert_close(products, torch.eye(half), rtol=0, atol=0.06)
    assert torch.equal(features[:, half:], -features[:, :half])


def test_the_products_of_patches_are_those_of_a_loop_over_them() -> None:
    images = torch.randn(
        2, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    expected = torch.zeros(12, 12, dtype=torch.float64)
    for image in images:
        for row in range(3):
            for column in range(4):
                patch = image[:, row : row + 2, column : column + 2].flatten()
                expected += patch[:, None] * patch
    torch.testing.assert_close(patch_products(images, kernel=2), expected)


def test_whitening_is_the_same_each_time_and_only_sets_the_frozen_stem() -> None:
    images, model, before = smooth_images(16), model_of(), dict(model_of().state_dict())
    first = {name: weight.clone() for name, weight in whiten(model, images).state_dict().items()}
    assert all(
        torch.equal(weight, first[name])
        for name, weight in whiten(model_of(), images).state_dict().items()
    )
    assert [name for name, weight in first.items() if not torch.equal(weight, before[name])] == [
        "stem.weight"
    ]
    assert not model.stem.weight.requires_grad


def test_whitening_leaves_other_models_alone_and_refuses_small_images() -> None:
    model = model_of("resnet8")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert all(
        torch.equal(weight, before[name])
        for name, weight in whiten(model, smooth_images(8)).state_dict().items()
    )
    with pytest.raises(ConfigError, match=r"images of 8 x 8 pixels are too small.*it needs 16"):
        whiten(model_of(), smooth_images(8))


def test_only_the_first_images_are_looked_at() -> None:
    images = smooth_images(16, num=5001)
    changed = images.train.images.clone(memory_format=torch.preserve_format)
    changed[5000:] = 0
    twin = replace(images, train=replace(images.train, images=changed))
    assert torch.equal(whiten(model_of(), images).stem.weight, whiten(model_of(), twin).stem.weight)
