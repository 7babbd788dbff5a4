from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from accel_trainer.core.errors import ConfigError
from accel_trainer.core.history import is_number
from accel_trainer.training.plain_values import plain_values


def test_what_a_metric_computed_becomes_plain_values() -> None:
    values = {
        "loss": np.float32(0.5),
        "tensor": torch.tensor(2.5),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "count": np.int64(3),
        "flag": np.bool_(True),
        "list": [np.float64(1.5), (1, None)],
        "matrix": torch.eye(2),
        "nested": {1: {"deep": np.arange(2)}},
        "word": "yes",
        "nan": np.float32("nan"),
    }
    plain = plain_values(values)
    assert math.isnan(plain.pop("nan"))
    assert plain == {
        "loss": 0.5,
        "tensor": 2.5,
        "half": 0.5,
        "count": 3,
        "flag": True,
        "list": [1.5, [1, None]],
        "matrix": [[1, 0], [0, 1]],
        "nested": {"1": {"deep": [0, 1]}},
        "word": "yes",
    }
    assert [name for name, value in plain.items() if is_number(value)] == [
        "loss",
        "tensor",
        "half",
        "count",
    ]
    assert {type(plain[name]) for name in ("loss", "tensor", "half")} == {float}


@pytest.mark.parametrize(
    ("computed", "said"),
    [
        (0.5, "compute returned an object of type float: return a dict of names and numbers"),
        ({"auc": [object()]}, "auc holds an object of type object: return numbers, texts, lists"),
        ({"auc": 1j}, "auc holds an object of type complex"),
    ],
)
def test_what_no_json_can_hold_is_refused(computed: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plain_values(computed)
