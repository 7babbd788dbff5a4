"""Reads the handwritten digits that come with scikit-learn: 1,797 real images, no download.

Shapes: N samples, C channels, H height, W width.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...core.errors import DataError
from .class_names import Integers
from .raw import RawImages, RawSplit

_SPLIT_SEED = 0
_TEST_FRACTION = 0.2
_SCALE = 2  # 8x8 pixels are too few for strided models: pixels are repeated to make 16x16


def read_digits() -> RawImages:
    """Read the digits: 1,438 for training, and 359 for testing, a fifth of each class.

    The split is always the same.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "DATA_LIBRARY",
            "the digits come with scikit-learn, which is not installed: pip install scikit-learn",
        ) from error
    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # values are 0 to 16
    images = images.repeat(_SCALE, axis=1).repeat(_SCALE, axis=2)[..., None]
    labels = digits.target.astype(np.int64)
    is_test = _stratified(labels)
    return RawImages(
        train=_raw_split(images[~is_test], labels[~is_test], "train"),
        test=_raw_split(images[is_test], labels[is_test], "test"),
        class_names=tuple(str(name) for name in digits.target_names),
    )


def _stratified(labels: Integers) -> NDArray[np.bool_]:
    """Choose the same fraction of each class for testing."""
    random = np.random.RandomState(_SPLIT_SEED)  # its numbers are the same in all numpy versions
    is_test = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        is_test[members[: round(len(members) * _TEST_FRACTION)]] = True
    return is_test


def _raw_split(images: NDArray[np.uint8], labels: Integers, name: str) -> RawSplit:
    return RawSplit(
        labels=labels,
        image_at=lambda index: images[index],
        name_of=lambda index: f"digit {index} ({name})",
    )
