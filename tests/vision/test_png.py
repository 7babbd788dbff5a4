from __future__ import annotations

import io
import re
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from accel_trainer import ConfigError
from accel_trainer.vision import to_png


def pixels_of(png: bytes) -> Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(png)))).permute(2, 0, 1)


def test_the_pixels_of_a_colour_picture_are_kept() -> None:
    picture = torch.arange(3 * 5 * 4, dtype=torch.uint8).reshape(3, 5, 4)
    assert torch.equal(pixels_of(to_png(picture)), picture)
    assert to_png(picture) == to_png(picture.clone())


@pytest.mark.parametrize("shape", [(1, 5, 4), (5, 4), (1, 4)])
def test_a_grey_picture_is_written_in_three_equal_colours(shape: tuple[int, ...]) -> None:
    picture = torch.arange(20, dtype=torch.uint8)[: torch.Size(shape).numel()].reshape(shape)
    assert torch.equal(pixels_of(to_png(picture)), picture.expand(3, *shape[-2:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_floats_are_clamped_and_nan_is_black(dtype: torch.dtype) -> None:
    values = [0.0, 0.5, 1.0, -3.0, 7.0, float("nan"), float("inf")]
    picture = torch.tensor([values], dtype=dtype, requires_grad=True)
    assert pixels_of(to_png(picture))[0].tolist() == [[0, 128, 255, 0, 255, 0, 255]]


@pytest.mark.parametrize(
    "picture",
    [
        torch.zeros(3, 4, 4, dtype=torch.int64),
        torch.zeros(3, 4, 4, dtype=torch.bool),
        torch.zeros(2, 4, 4),
        torch.zeros(1, 3, 4, 4),
        torch.zeros(4),
        torch.tensor(1.0),
        torch.zeros(3, 0, 4),
    ],
)
def test_a_tensor_that_is_no_picture_is_one_line(picture: Tensor) -> None:
    found = f"{picture.dtype} {list(picture.shape)} is not a picture: give uint8, or floats"
    with pytest.raises(ConfigError, match=re.escape(found)):
        to_png(picture)


def test_a_missing_pillow_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"pip install 'accel-trainer\[vision\]'"):
        to_png(torch.zeros(3, 4, 4))
