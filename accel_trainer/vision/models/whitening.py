"""Computes the first filters of a network from its training images.

Shapes: N images, C channels, H height, W width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.errors import ConfigError
from ..data.images import ImageDataset
from .airbench import Airbench

_NUM_IMAGES = 5000
_CHUNK_IMAGES = 250
_EPS = 5e-4  # limits the amplification of noise
_MIN_SIZE = 16


def whiten(model: nn.Module, images: ImageDataset) -> nn.Module:
    """Set the stem of an `Airbench`, in place, to the principal directions of training images.

    They are computed from patches of the first images, and scaled to unit variance. Any other model
    is returned unchanged. The model must be on the CPU, so that all processes compute the same
    filters.

    Raises:
        ConfigError: the images are too small for the network.
    """
    if not isinstance(model, Airbench):
        return model
    pixels = images.train.images[:_NUM_IMAGES]
    if min(pixels.shape[2:]) < _MIN_SIZE:
        size = f"{pixels.shape[2]} x {pixels.shape[3]} pixels"
        fact = f"images of {size} are too small for an airbench network"
        fix = f"it needs {_MIN_SIZE}; choose a different --model"
        raise ConfigError("MODEL_NAME", f"{fact}: {fix}")
    mean, std = (
        torch.tensor(values)[:, None, None]
        for values in (images.normalization.mean, images.normalization.std)
    )
    kernel = model.stem.kernel_size[0]
    covariance = sum(
        patch_products((chunk / 255 - mean) / std, kernel=kernel)
        for chunk in pixels.split(_CHUNK_IMAGES)
    )
    assert isinstance(covariance, Tensor)
    height, width = (side - kernel + 1 for side in pixels.shape[2:])
    eigenvalues, directions = torch.linalg.eigh(covariance / (len(pixels) * height * width))
    filters = (directions / (eigenvalues + _EPS).sqrt()).T.reshape(-1, *model.stem.weight.shape[1:])
    model.stem.weight.data.copy_(torch.cat([filters, -filters]))
    return model


def patch_products(images: Tensor, *, kernel: int) -> Tensor:
    """Sum the products of pixels over all patches of images [N, C, H, W]: float64 [D, D].

    A patch has `kernel` x `kernel` pixels, and D is C * kernel * kernel.
    """
    patches = F.unfold(images.contiguous(), kernel)  # [N, D, patches of an image]
    return (patches @ patches.mT).double().sum(0)
