from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_trainer.core.errors import ConfigError
from accel_trainer.data.samples import Columns, check_dataset

ROWS = [{"image": 1.5, "label": 0, "more": "text"}, {"image": 2.5, "label": 1, "more": "text"}]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.ones(3)


@pytest.mark.parametrize("dataset", [ROWS, TensorDataset(torch.ones(3)), np.ones(3)])
def test_anything_with_a_length_and_an_index_is_a_dataset(dataset: Any) -> None:
    check_dataset(dataset, "train")


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (TensorDataset, "train is TensorDataset: give an instance of it"),
        (DataLoader(TensorDataset(torch.ones(3))), "train is DataLoader: give its dataset,"),
        ({"train": ROWS, "test": ROWS}, "train is dict: give one of its parts, 'train', 'test'"),
        (Stream(), "train is Stream: it has no .index., so give a function that starts it"),
        ("data/train", "train is str: give an object with len.. and .index."),
        (None, "train is NoneType: give an object with len.. and .index."),
    ],
)
def test_what_is_no_dataset_is_refused_with_what_to_give(dataset: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_dataset(dataset, "train")


def test_columns_of_a_table_are_samples_of_an_input_and_a_target() -> None:
    samples = Columns(ROWS, ("image", "label"))
    assert [samples[index] for index in range(len(samples))] == [(1.5, 0), (2.5, 1)]


def test_a_column_that_a_table_lacks_is_named() -> None:
    with pytest.raises(KeyError, match="no column picture, only image, label, more"):
        Columns(ROWS, ("picture", "label"))[0]
    with pytest.raises(ConfigError, match="columns='image': pass two names"):
        Columns(ROWS, "image")  # type: ignore[arg-type]


def test_a_picture_of_a_column_becomes_a_tensor_of_channels_from_0_to_1() -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    rows = [
        {"image": image.fromarray(pixels), "label": 0},
        {"image": image.new("L", (3, 2), 255), "label": 1},
    ]
    samples = Columns(rows, ("image", "label"))
    assert torch.equal(samples[0][0], torch.from_numpy(pixels).permute(2, 0, 1).float() / 255)
    assert torch.equal(samples[1][0], torch.ones(1, 2, 3))


@pytest.mark.parametrize("length", [-1, -(2**40)])
def test_a_negative_length_is_one_line(length: int) -> None:
    class Negative:
        def __len__(self) -> int:
            return length

        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(ConfigError, match=rf"DATASET.*Negative: its len\(\) is {length}, so "):
        check_dataset(Negative(), "the training set")
