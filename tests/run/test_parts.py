from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from accel_trainer import Callback, ClassificationTask, MeanLoss
from accel_trainer.core.errors import ConfigError
from accel_trainer.run.parts import check_parts


def test_parts_of_the_right_kind_are_accepted() -> None:
    model = nn.Linear(2, 2)
    check_parts(
        model=model, task=ClassificationTask(), metrics=[MeanLoss()], callbacks=(Callback(),)
    )
    check_parts(metrics=[], callbacks=iter([]))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"model": nn.Linear}, r"model= has the class Linear: give an instance of it, Linear\(\)"),
        (
            {"task": nn.Linear(2, 2)},
            "task= has an object of type Linear, without step",
        ),
        (
            {"train_set": [1, 2]},
            "train_set= has an object of type list, without plan and step_batches",
        ),
        ({"metrics": MeanLoss()}, "metrics= is no list: put it in brackets"),
        ({"metrics": "accuracy"}, "metrics= is no list: put it in brackets"),
        (
            {"metrics": [MeanLoss]},
            r"metrics= has the class MeanLoss: give an instance of it, MeanLoss\(\)",
        ),
        (
            {"callbacks": [print]},
            "callbacks= has an object of type builtin_function_or_method, without on_fit_start",
        ),
    ],
)
def test_a_part_of_the_wrong_kind_is_named(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_parts(**parts)
