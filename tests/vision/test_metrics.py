"""Which metrics a classifier of images has."""

from __future__ import annotations

import pytest

from accel_trainer.vision import classification_metrics


@pytest.mark.parametrize(
    ("num_classes", "names"),
    [(5, ["loss", "accuracy"]), (6, ["loss", "accuracy", "top5_accuracy"])],
)
def test_the_top_5_accuracy_needs_more_than_5_classes(num_classes: int, names: list[str]) -> None:
    metrics = classification_metrics(num_classes)
    assert [name for each in metrics for name in each.higher_is_better] == names
