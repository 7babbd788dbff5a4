from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from accel_trainer.core.types import Batch, StepOutput
from accel_trainer.vision import WorstMistakes


class Loader:
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.reader = self

    def picture_of(self, sample_id: int) -> Tensor:
        raise NotImplementedError

    def name_of(self, sample_id: int) -> str:
        raise NotImplementedError


def worst_by_sorting(logits: Tensor, labels: Tensor) -> list[tuple[int, int, int]]:
    rows = []
    for number, (row, label) in enumerate(
        zip(logits.softmax(1).tolist(), labels.tolist(), strict=True)
    ):
        prediction = row.index(max(row))
        if prediction != label:
            rows.append((-max(row), number, label, prediction))
    return [(number, label, prediction) for _, number, label, prediction in sorted(rows)[:24]]


def test_the_surest_mistakes_are_found_for_any_batches_and_processes() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = (
        torch.randn(200, 7, generator=generator),
        torch.randint(7, (200,), generator=generator),
    )
    metric = WorstMistakes(Path(), Loader(200), [])
    expected = worst_by_sorting(logits, labels)
    for num_processes, batch_size in ((1, 200), (1, 13), (3, 8)):
        parts = [metric.empty(torch.device("cpu")) for _ in range(num_processes)]
        for number, ids in enumerate(torch.randperm(200, generator=generator).split(batch_size)):
            batch = Batch(torch.zeros(len(ids), 1), labels[ids], ids)
            metric.update(
                parts[number % num_processes], batch, StepOutput(torch.zeros(len(ids)), logits[ids])
            )
        found = metric.compute(torch.stack(parts).sum(0))["worst_mistakes"]
        assert [(each["id"], each["label"], each["prediction"]) for each in found] == expected
        probabilities = [each["probability"] for each in found]
        assert probabilities == sorted(probabilities, reverse=True)


def test_predictions_are_of_evenly_spaced_samples_that_count() -> None:
    metric = WorstMistakes(Path(), Loader(100), [])
    sums = metric.empty(torch.device("cpu"))
    ids = torch.arange(0, 100, 2)  # of the others, nothing is known
    logits = torch.eye(5)[ids % 5]
    logits[0, 0] = torch.nan
    batch = Batch(torch.zeros(50, 1), ids % 3, ids)
    metric.update(sums, batch, StepOutput(torch.zeros(50), logits))
    found = metric.compute(sums)["predictions"]
    assert len(found) == 16
    assert [each["id"] for each in found] == [2 * (number * 50 // 16) for number in range(16)]
    assert all(each["label"] == each["id"] % 3 for each in found)
    assert found[0]["probability"] == 0.0, "not NaN, which is no JSON"
    assert {each["prediction"] == each["label"] for each in found} == {True, False}


def test_a_classifier_without_mistakes_has_none() -> None:
    metric = WorstMistakes(Path(), Loader(3), [])
    sums = metric.empty(torch.device("cpu"))
    batch = Batch(torch.zeros(3, 1), torch.tensor([0, 1, 2]), torch.arange(3))
    metric.update(sums, batch, StepOutput(torch.zeros(3), torch.eye(3)))
    assert metric.compute(sums)["worst_mistakes"] == []
