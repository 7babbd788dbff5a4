"""What data workers do as processes is in `test_dataloader.py`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from accel_trainer.core.errors import DataError
from accel_trainer.core.types import Batch
from accel_trainer.data.workers import SampleReader, inputs_and_targets

CPU = torch.device("cpu")


class Drawing:
    """Samples that draw from all three global generators."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()]), index


def read(reader: SampleReader, *ids: list[int], key: int = 0) -> list[Batch]:
    return list(reader.read([torch.tensor(batch, dtype=torch.int64) for batch in ids], key=key))


def test_a_sample_draws_by_its_id_and_the_key_wherever_it_stands() -> None:
    reader = SampleReader(Drawing(), CPU)
    (together,) = read(reader, [3, 7])
    later, alone = read(reader, [1, 2], [7])
    assert torch.equal(together.inputs[1], alone.inputs[0])
    assert not torch.equal(together.inputs[0], together.inputs[1])
    assert not torch.equal(read(reader, [7], key=1)[0].inputs, alone.inputs)
    assert later.sample_ids.tolist() == [1, 2]


def test_reading_samples_leaves_the_ids_and_targets_together() -> None:
    (batch,) = read(SampleReader(Drawing(), CPU), [9, 0, 4])
    assert batch.targets.tolist() == batch.sample_ids.tolist() == [9, 0, 4]


def test_a_batch_without_samples_has_the_shape_of_one_with_them() -> None:
    full, empty = read(SampleReader(Drawing(), CPU), [1, 2], [])
    assert empty.inputs.shape == (0, *full.inputs.shape[1:])
    assert (len(empty), empty.targets.dtype) == (0, full.targets.dtype)


@pytest.mark.parametrize(
    ("collated", "expected"),
    [
        (([1, 2], [0, 1]), ([1, 2], [0, 1])),
        ({"ids": [1, 2], "labels": [0, 1]}, ({"ids": [1, 2]}, [0, 1])),
        ({"ids": [1, 2]}, ({"ids": [1, 2]}, None)),
    ],
)
def test_a_collated_batch_is_a_pair_or_a_mapping_with_labels(collated: Any, expected: Any) -> None:
    assert inputs_and_targets(collated) == expected


def test_a_collated_batch_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="the batch is a list, not of .input, target. pairs"):
        inputs_and_targets([1, 2, 3])


def test_a_label_outside_the_classes_names_its_sample() -> None:
    reader = SampleReader(Drawing(), CPU, num_classes=5)
    read(reader, [4])
    with pytest.raises(DataError, match="sample 7 has label 7, the classes are 0 to 4"):
        read(reader, [1, 7])
