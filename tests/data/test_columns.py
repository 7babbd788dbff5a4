"""A table of `datasets` by the names of its columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor
from torch.utils.data import TensorDataset

from accel_trainer import (
    BatchConfig,
    ConfigError,
    DataError,
    DatasetOptions,
    build_train_loader,
)
from accel_trainer.core.types import Batch

PIXELS = torch.randint(
    0, 256, (12, 4, 5, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
)
LABELS = torch.arange(12) % 3


def table_of(pictures: list[Any]) -> datasets.Dataset:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    return datasets.Dataset.from_dict(
        {"image": pictures, "label": LABELS.tolist()}, features=features
    )


def first_batch(dataset: Any, **options: Any) -> Batch:
    batch = BatchConfig(per_device_batch_size=6)
    loader = build_train_loader(
        dataset,
        batch,
        seed=0,
        accelerator=Accelerator(),
        options=DatasetOptions(**options),
    )
    return next(loader.step_batches(0, 0)).micro_batches[0]


def test_columns_of_a_table_are_the_samples_of_the_same_tensors() -> None:
    table = table_of([Image.fromarray(pixels.numpy()) for pixels in PIXELS])
    found = first_batch(table, columns=("image", "label"), num_classes=3)
    expected = first_batch(TensorDataset(PIXELS.permute(0, 3, 1, 2).float() / 255, LABELS))
    assert torch.equal(found.inputs, expected.inputs)
    assert torch.equal(found.targets, expected.targets)
    assert torch.equal(found.sample_ids, expected.sample_ids)


def test_a_grey_picture_has_one_channel_and_a_transparent_one_is_refused() -> None:
    grey = first_batch(
        table_of([Image.new("L", (5, 4), index) for index in range(12)]), columns=("image", "label")
    )
    assert grey.inputs.shape == (6, 1, 4, 5)
    with pytest.raises(DataError, match="a picture has mode RGBA: convert it"):
        first_batch(table_of([Image.new("RGBA", (5, 4))] * 12), columns=("image", "label"))


def test_a_transform_of_the_table_is_applied_before_its_columns_are_read() -> None:
    def add_shape(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {
            "size": [torch.tensor(image.size) for image in rows["image"]],
            "label": rows["label"],
        }

    table = table_of([Image.fromarray(pixels.numpy()) for pixels in PIXELS])
    assert (
        first_batch(table.with_transform(add_shape), columns=("size", "label")).inputs.tolist()
        == [[5, 4]] * 6
    )


@pytest.mark.parametrize(
    ("row", "dtype"),
    [([0.5, 1], torch.float32), ([[1, 2], [3, 4]], torch.int64), ([True], torch.bool)],
)
def test_lists_of_numbers_in_a_column_are_tensors(row: list[Any], dtype: torch.dtype) -> None:
    table = datasets.Dataset.from_dict({"row": [row] * 12, "marks": [[0, 1]] * 12})
    batch = first_batch(table, columns=("row", "marks"))
    assert torch.equal(batch.inputs, torch.tensor([row] * 6))
    assert batch.inputs.dtype == dtype
    assert batch.targets.tolist() == [[0, 1]] * 6


def test_lists_of_different_lengths_go_to_collate_as_they_are() -> None:
    table = datasets.Dataset.from_dict(
        {"row": [[1.0] * (1 + index % 2) for index in range(12)], "label": [0] * 12}
    )
    with pytest.raises(DataError, match=r"cannot be collated.*DatasetOptions\(collate=") as found:
        first_batch(table, columns=("row", "label"))
    assert "\n" not in str(found.value)
    lengths = first_batch(
        table,
        columns=("row", "label"),
        collate=lambda samples: (
            torch.tensor([len(row) * isinstance(row, list) for row, _ in samples]),
            torch.ones(6),
        ),
    )
    assert set(lengths.inputs.tolist()) == {1, 2}


def count_words(samples: list[tuple[str, int]]) -> tuple[Tensor, Tensor]:
    texts, stars = zip(*samples, strict=True)
    return torch.tensor([text.count("good") for text in texts]), torch.tensor(stars)


def test_a_text_column_goes_to_collate() -> None:
    table = datasets.Dataset.from_dict(
        {"text": ["good " * index for index in range(12)], "stars": list(range(12))}
    )
    batch = first_batch(table, columns=("text", "stars"), collate=count_words)
    assert torch.equal(batch.inputs, batch.targets)


def test_a_table_read_from_a_local_file_needs_no_network(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("number,label\n" + "0.5,1\n" * 12)
    files = {"data_files": str(tmp_path / "rows.csv"), "cache_dir": str(tmp_path / "cache")}
    table = datasets.load_dataset("csv", split="train", **files)
    assert first_batch(table, columns=("number", "label")).inputs.tolist() == [0.5] * 6


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (("picture", "label"), "KeyError: 'no column picture, only image, label'"),
        ("image", "columns='image': pass two names"),
        (("image",), "pass two names, such as columns="),
    ],
)
def test_columns_that_are_not_there_are_one_line(columns: Any, said: str) -> None:
    with pytest.raises((ConfigError, DataError), match=said):
        first_batch(table_of([None] * 12), columns=columns)
